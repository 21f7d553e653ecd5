"""What leaves comes back exact, to every view of it, however often, and whatever interrupts."""

import gc

import pytest
import torch
from torch import Tensor

from hybridrl.memory.arena import Arena
from hybridrl.memory.lane import Fence, Pair, make_lane
from hybridrl.memory.pages import LARGE_PAGE, resident_bytes
from hybridrl.memory.parcel import Parcel, ParcelError, Where, checksum, planned_bytes, whole

CPU = torch.device("cpu")


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def parcel(*groups: list[Tensor], join: bool = True, verify: bool = True) -> Parcel:
    needed = planned_bytes([[nbytes(t) for t in group] for group in groups])
    return Parcel("state", Arena(needed).section("state", needed), make_lane(CPU), join=join, verify=verify)


def cycle(moved: Parcel, *groups: list[Tensor]) -> None:
    moved.leave(groups)
    moved.left()
    assert all(nbytes(t) == 0 for group in groups for t in group)
    moved.come_back()
    moved.wait()


@pytest.mark.parametrize("join", [True, False])
def test_many_cycles_change_no_bit_and_take_no_memory(join: bool) -> None:
    masters, moments = tensors(7, 300, 1_000_000), tensors(7, 300, 1_000_000, dtype=torch.bfloat16)
    masters[1][3] = torch.nan
    views = [t[1:] for t in masters] if not join else []
    expected = [t.clone() for t in masters + moments]
    moved = parcel(masters, moments, join=join, verify=False)
    gc.collect()  # what earlier tests have left does not go in between
    address, resident = moved.section.data_ptr(), 0
    for turn in range(60):
        cycle(moved, masters, moments)
        found = masters + moments
        assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))
        assert all(v.view(torch.uint8).equal(t[1:].view(torch.uint8)) for v, t in zip(views, masters, strict=False))
        masters[0] += 1  # the second time is of other values
        expected[0] += 1
        if turn == 30:
            resident = resident_bytes()
    assert moved.section.data_ptr() == address
    assert resident_bytes() - resident < 16 * 2**20


def test_small_storages_become_one_a_group_and_the_tensors_stay_the_same_objects() -> None:
    masters, moments = tensors(7, 300, 40), tensors(9, 10)
    moved = parcel(masters, moments)
    before = [id(t) for t in masters + moments]
    cycle(moved, masters, moments)
    homes = [{t.untyped_storage().data_ptr() for t in group} for group in (masters, moments)]
    assert [len(home) for home in homes] == [1, 1]
    assert homes[0] != homes[1]
    addresses = [t.storage_offset() for t in masters]
    cycle(moved, masters, moments)  # now as one copy a group, and in place
    assert [t.storage_offset() for t in masters] == addresses
    assert [id(t) for t in masters + moments] == before


def test_what_came_back_to_a_block_stays_at_its_address_and_is_nowhere_while_away() -> None:
    masters, moments = tensors(9 << 20, 300, 40), tensors(9 << 20, dtype=torch.bfloat16)  # of 36 MiB, and small ones
    expected = [t.clone() for t in masters + moments]
    moved = parcel(masters, moments, verify=False)
    cycle(moved, masters, moments)
    gc.collect()  # what earlier tests have left does not go in between
    addresses = [t.data_ptr() for t in masters + moments]
    assert addresses[0] % LARGE_PAGE == addresses[3] % LARGE_PAGE == 0
    for _ in range(3):
        here = resident_bytes()
        moved.leave([masters, moments])
        moved.left()
        assert all(nbytes(t) == 0 for t in masters + moments)
        assert [t.shape for t in masters + moments] == [t.shape for t in expected]
        assert here - resident_bytes() > 40 * 2**20
        moved.wait()
        assert abs(here - resident_bytes()) < 16 * 2**20
        assert [t.data_ptr() for t in masters + moments] == addresses
        assert all(t.equal(e) for t, e in zip(masters + moments, expected, strict=True))
        masters[0] += 1
        expected[0] += 1


def test_blocks_follow_tensors_that_are_made_anew_and_go_with_those_that_are_no_more() -> None:
    masters, moments = tensors(9 << 20, 300), tensors(9 << 20)
    moved = parcel(masters, moments, verify=False)
    cycle(moved, masters, moments)
    for seed in range(3):
        gc.collect()
        before = resident_bytes()
        moments[0] = torch.full((9 << 20,), float(seed))
        masters[1].data = torch.full((300,), float(seed))  # the same tensor elsewhere
        cycle(moved, masters, moments)
        assert bool((moments[0] == seed).all())
        assert masters[1].tolist() == [seed] * 300
        gc.collect()
        assert abs(resident_bytes() - before) < 20 * 2**20


def test_some_of_a_parcel_can_be_waited_for_and_then_all() -> None:
    first, second = tensors(9 << 20), tensors(9 << 20)
    expected = first[0].clone(), second[0].clone()
    moved = parcel(first, second, verify=False)
    for _ in range(3):
        moved.leave([first, second])
        moved.left()
        moved.wait_for(second)
        assert moved.where is Where.RETURNING
        assert second[0].equal(expected[1])
        moved.wait_for(first)
        assert first[0].equal(expected[0])
        moved.wait()
        assert moved.where is Where.HERE


def test_views_of_one_storage_leave_and_come_back_together() -> None:
    whole_buffer = torch.arange(100.0)
    first, second = whole_buffer[:40].view(5, 8), whole_buffer[40:]
    moved = parcel([whole_buffer])
    cycle(moved, [first, second])
    assert first.equal(torch.arange(40.0).view(5, 8))
    assert second.equal(torch.arange(40.0, 100.0))
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() == whole_buffer.data_ptr()


def test_memory_that_torch_cannot_resize_leaves_too() -> None:
    borrowed = torch.frombuffer(bytearray(range(64)), dtype=torch.uint8)
    moved = parcel([borrowed])
    cycle(moved, [borrowed])
    assert borrowed.equal(torch.arange(64, dtype=torch.uint8))


def test_what_is_not_there_yet_or_no_more_makes_no_difference() -> None:
    masters, moments = tensors(50), tensors(50)
    moved = parcel(masters, moments)
    cycle(moved, masters)
    cycle(moved, masters, moments)
    moments[:] = tensors(50)  # as after a load
    expected = moments[0].clone()
    cycle(moved, masters, moments)
    assert moments[0].equal(expected)
    cycle(moved)


def test_more_than_was_planned_is_refused_with_the_numbers_and_nothing_leaves() -> None:
    planned, more = tensors(100), tensors(500)
    moved = parcel(planned)
    with pytest.raises(ParcelError, match=r"state: 3024 bytes .* has 1024"):
        moved.leave([planned, more])
    assert moved.where is Where.HERE
    cycle(moved, planned)


def test_any_step_may_follow_an_interrupted_one() -> None:
    data = tensors(1000)
    expected = data[0].clone()
    moved = parcel(data)
    moved.left()
    moved.wait()
    moved.leave([data])
    moved.leave([data])
    moved.wait()  # it never left: nothing was freed
    assert data[0].equal(expected)
    moved.leave([data])
    moved.left()
    moved.left()
    moved.come_back()
    moved.leave([data])  # on its way back when it leaves again
    moved.left()
    assert nbytes(data[0]) == 0
    moved.wait()
    assert data[0].equal(expected)


class BrokenLane:
    """Copies that write zeros."""

    def copy(self, pairs: list[Pair]) -> Fence:
        return make_lane(CPU).copy([(target, torch.zeros_like(source)) for target, source in pairs])

    def close(self) -> None:
        pass


def test_bytes_that_come_back_otherwise_are_found() -> None:
    data = tensors(100)
    moved = Parcel("state", Arena(1024).section("state", 1024), BrokenLane(), join=False, verify=True)
    moved.leave([data])
    moved.left()
    with pytest.raises(ParcelError, match="state: 400 bytes came back from the arena otherwise than they left"):
        moved.wait()


class FailingLane(BrokenLane):
    """Copies that fail, which shows when they are waited for."""

    def copy(self, pairs: list[Pair]) -> Fence:
        return make_lane(CPU).copy([(target[:-1], source) for target, source in pairs])


@pytest.mark.parametrize("join", [True, False])
def test_nothing_is_freed_whose_copy_has_not_ended_well(join: bool) -> None:
    data = tensors(100, 3000)
    expected = [t.clone() for t in data]
    moved = Parcel("state", Arena(1 << 16).section("state", 1 << 16), FailingLane(), join=join)
    moved.leave([data])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            moved.left()
        assert [nbytes(t) for t in data] == [400, 12000]
        assert all(t.equal(e) for t, e in zip(data, expected, strict=True))


def test_the_checksum_sees_a_changed_bit_and_a_changed_order() -> None:
    data = torch.arange(100_000).to(torch.uint8)
    flipped, swapped = data.clone(), data.clone()
    flipped[70_000] ^= 1
    swapped[[3, 11]] = data[[11, 3]]  # of two words, at the same place in each: their sum stays
    assert not checksum(data).equal(checksum(flipped))
    assert not checksum(data).equal(checksum(swapped))
    assert checksum(data).equal(checksum(data.clone()))


def test_traffic_is_counted_by_direction_and_starts_anew_when_taken() -> None:
    data = tensors(1000)
    moved = parcel(data)
    cycle(moved, data)
    out, back = moved.out.take(), moved.back.take()
    assert (out["bytes"], back["bytes"]) == (4000, 4000)
    assert all(0 <= found["hidden_seconds"] <= found["seconds"] for found in (out, back))
    assert moved.out.take() == {"bytes": 0, "seconds": 0, "hidden_seconds": 0}


def test_a_storage_is_freed_for_every_reference_to_it() -> None:
    data = tensors(16 << 20)  # 64 MiB, which no allocator keeps to itself
    kept = data[0].detach()
    moved = parcel(data, join=False, verify=False)
    gc.collect()
    moved.leave([data])
    moved._lane.copy([]).wait()
    before = resident_bytes()
    moved.left()
    assert before - resident_bytes() > 48 * 2**20
    assert nbytes(kept) == 0
    moved.wait()
    assert kept.equal(data[0])
    assert whole(kept.untyped_storage()).numel() == 64 * 2**20
