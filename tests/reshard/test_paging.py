"""Which pages strided tensors touch, and when a program takes and gives them."""

import itertools

import pytest
import torch

from hybridrl.memory.region import Region
from hybridrl.reshard.compile import Batch, CompiledRound, Program, Runnable
from hybridrl.reshard.paging import Paging, _Pages
from hybridrl.reshard.transports import Exchange
from tests.reshard.poison import PoisonPages, poison_region

PAGE = PoisonPages.page_bytes


def region(pages: int) -> Region:
    return poison_region(pages * PAGE)


def views() -> list[torch.Tensor]:
    base = torch.zeros(4096, dtype=torch.int16)
    shapes = [(3, 40, 7), (5, 1, 300), (2, 2, 2, 100)]
    cut = [base[17 : 17 + 840].view(3, 40, 7), base[:1500].view(5, 1, 300), base[3:803].view(2, 2, 2, 100)]
    found = []
    for tensor, shape in zip(cut, shapes, strict=True):
        assert tensor.shape == shape
        for dim in range(tensor.dim()):
            for start, stop in ((0, 1), (0, tensor.shape[dim]), (tensor.shape[dim] // 2, tensor.shape[dim])):
                found += [part := tensor.narrow(dim, start, stop - start), part.transpose(0, -1), part[..., :3]]
    return [tensor for tensor in found if tensor.numel()]


def test_pages_of_strided_views_are_those_of_their_elements() -> None:
    """Against a mark on each element."""
    memory = region(129)
    base = memory._pages.base
    for view in views():
        lying = base.view(torch.int16).as_strided(view.shape, view.stride(), view.storage_offset())
        base.zero_()
        lying.fill_(-1)
        expected = base.view(-1, PAGE).any(1)
        assert torch.equal(torch.from_numpy(_Pages(memory).touch([lying]).flags()), expected), view.stride()


def test_tensors_elsewhere_touch_no_page() -> None:
    assert not _Pages(region(4)).touch([torch.zeros(1000), torch.zeros(0)]).flags().any()


class Recorder:
    """Something that runs, and keeps what each side has then."""

    def __init__(self, source: Region, destination: Region) -> None:
        self.sides = source, destination
        self.seen: list[tuple[int, int]] = []

    def note(self) -> None:
        self.seen.append(tuple(side.committed_bytes // PAGE for side in self.sides))  # type: ignore[arg-type]


def test_each_page_goes_after_its_last_read_and_comes_before_its_first_write() -> None:
    source, destination = region(8), region(8)
    ours, theirs = (side.take((8 * PAGE,), torch.uint8) for side in (source, destination))
    source.commit()
    ours.copy_(torch.arange(8 * PAGE) % 251)
    staged, halves = torch.zeros(4 * PAGE, dtype=torch.uint8), [slice(0, 2 * PAGE), slice(2 * PAGE, 4 * PAGE)]
    # Pages 0 to 3 are sent in two rounds to this rank itself, with page 3 read in both; 4 to 6 are copied; 7 is unread.
    packs = [
        [Batch([staged[halves[0]], staged[3 * PAGE :]], [ours[halves[0]], ours[3 * PAGE : 4 * PAGE]])],
        [Batch([staged[halves[1]]], [ours[halves[1]]])],
    ]
    none = Exchange(staged[:0], staged[:0], [0], [0])
    rounds = tuple(
        CompiledRound(tuple(pack), none, (Batch([theirs[half]], [staged[half]]),), relay=False)
        for pack, half in zip(packs, halves, strict=True)
    )
    copies = (Batch([theirs[4 * PAGE : 7 * PAGE]], [ours[4 * PAGE : 7 * PAGE]]),)
    paging = Paging(source, destination, chunk_bytes=PAGE)
    program = paging(Program(copies, [theirs[7 * PAGE :]], rounds, ()))
    expected = ours[: 7 * PAGE].clone()
    recorder = Recorder(source, destination)

    def run(parts: tuple[Runnable, ...]) -> None:
        for part in parts:
            part.run()
        recorder.note()

    run(program.copies)
    assert program.fills == []
    for one in program.rounds:
        run(one.pack)
        run(one.unpack)
    run(program.echoes)
    assert torch.equal(theirs[: 7 * PAGE], expected)
    assert not theirs[7 * PAGE :].any()
    # page 7 goes unread, and is padding there that is cleared last; copies run in the rounds, a third and two thirds
    assert recorder.seen == [(7, 0), (4, 1), (4, 3), (0, 5), (0, 7), (0, 8)]
    assert paging.peak_bytes == 8 * PAGE


def test_what_is_sent_too_is_copied_when_it_is_sent_for_the_last_time() -> None:
    """However the bytes that are sent and those that are copied lie to each other."""
    source, destination = region(12), region(12)
    ours, theirs = (side.take((12 * PAGE,), torch.uint8) for side in (source, destination))
    source.commit()
    staged, pages = torch.zeros(3 * PAGE, dtype=torch.uint8), ours.view(12, PAGE)
    # Pages 9 and 8 are sent in the first round, 9 and a byte of each of 0 to 3 in the last, the others not at all.
    packs = [
        [Batch([staged[: 2 * PAGE]], [ours[8 * PAGE : 10 * PAGE]])],
        [],
        [Batch([staged[:PAGE], staged[PAGE : PAGE + 4]], [pages[9], pages[:4, 5]])],
    ]
    none = Exchange(staged[:0], staged[:0], [0], [0])
    rounds = tuple(CompiledRound(tuple(pack), none, (), relay=False) for pack in packs)
    paging = Paging(source, destination, chunk_bytes=PAGE)
    program = paging(Program((Batch([theirs], [ours]),), [], rounds, ()))
    assert [part for part in program.copies if isinstance(part, Batch)] == []
    copied = []
    for one in program.rounds:
        batches = [part for part in one.pack if isinstance(part, Batch)]
        to = [(write.data_ptr() - destination.address) // PAGE for batch in batches for write in batch.writes]
        copied.append([page for page in to if 0 <= page < 12])
    assert copied == [[8], [4, 5, 6, 7], [0, 1, 2, 3, 9, 10, 11]]


@pytest.mark.parametrize("by_source", [False, True])
def test_copies_are_cut_and_run_in_the_order_of_one_side(by_source: bool) -> None:
    source, destination = region(16), region(16)
    ours, theirs = (side.take((16 * PAGE,), torch.uint8) for side in (source, destination))
    pairs = [(theirs[4 * a * PAGE :][: 4 * PAGE], ours[4 * b * PAGE :][: 4 * PAGE]) for a, b in enumerate((2, 0, 3, 1))]
    batch = Batch([write for write, _ in pairs], [read for _, read in pairs])
    program = Paging(source, destination, chunk_bytes=2 * PAGE, by_source=by_source)(Program((batch,), [], (), ()))
    parts = [part for part in program.copies if isinstance(part, Batch)]
    assert [[write.nbytes for write in part.writes] for part in parts] == [[2 * PAGE]] * 8
    places = [(part.reads if by_source else part.writes)[0].data_ptr() for part in parts]
    assert all(a < b for a, b in itertools.pairwise(places))


def test_pages_with_anything_that_is_kept_stay() -> None:
    source, destination = region(4), region(4)
    ours, theirs = (side.take((4 * PAGE,), torch.uint8) for side in (source, destination))
    source.commit()
    kept = ours[PAGE + 5 : PAGE + 9]
    copies = (Batch([theirs], [ours]),)
    for part in Paging(source, destination, kept=[kept], chunk_bytes=PAGE)(Program(copies, [], (), ())).copies:
        part.run()
    assert source.committed_bytes == PAGE
    source.check(kept, "kept")


def test_what_is_no_copy_cannot_be_paged() -> None:
    class Other:
        def run(self) -> None: ...

    with pytest.raises(TypeError, match="Other in a compiled program"):
        Paging(region(1), region(1), chunk_bytes=1)(Program((Other(),), [], (), ()))
