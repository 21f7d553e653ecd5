"""A parcel: tensors that leave the device together, into a section of the arena, and come back exact.

It is done to storages, not to tensors: `resize_(0)` frees the memory under every view at once, and every view has it
again afterwards, so nobody's reference is left behind. Small storages come back as one large one that their tensors
then are views of; from then on they travel as one copy. On a CPU such a run of tensors, or a large tensor, comes back
to a block that is its own (see `hybridrl.memory.block`).

    leave → (copies run) → left → away → come_back → (copies run) → wait_for (some of them) → wait

Each step may be repeated, and any may follow an interrupted one: bytes are freed only after their copy has ended, and
what has not been freed need not come back.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from hybridrl.memory.block import Block
from hybridrl.memory.lane import Fence, Lane
from hybridrl.memory.loan import Loan
from hybridrl.memory.pages import populate_beside

ALIGNMENT = 512
"""Each storage begins at a multiple of it, in the arena and in a joined storage."""
LARGE = 32 << 20
"""A storage of so many bytes is not joined with others."""
RUN = 256 << 20
"""Small storages are joined up to about so many bytes."""

CHECKED = 1 << 20
"""Words that a checksum reads at a time."""


class ParcelError(RuntimeError):
    """The arena's section is too small, or bytes did not come back as they left."""


class Where(Enum):
    """Where a parcel's bytes are."""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"


@dataclass
class _Piece:
    storage: torch.UntypedStorage
    nbytes: int
    offset: int
    tensors: list[Tensor]
    moves: bool
    """Whether its tensor, the only one, may come back in another storage."""
    block: Block | None = None
    """Where it comes back to."""
    checksum: Tensor | None = None

    def free(self) -> None:
        """Takes the memory from its tensors."""
        if self.block is None:
            self.storage.resize_(0)
        else:
            self.block.vacate(self.tensors)

    def restore(self) -> Tensor:
        """Gives its tensors memory again; returns all of it, uint8."""
        if self.block is None:
            self.storage.resize_(self.nbytes)
        else:
            self.storage = self.block.occupy().untyped_storage()
        return whole(self.storage)


@dataclass
class _Return:
    """Pieces that come back as one copy."""

    run: list[_Piece]
    fence: Fence


@dataclass
class Traffic:
    """What a parcel has moved, in one direction."""

    nbytes: int = 0
    fences: list[Fence] = field(default_factory=list)

    def take(self) -> dict[str, float]:
        """Bytes, seconds of copying and those of them that nobody waited for, and nothing moved afterwards."""
        seconds = sum(fence.seconds for fence in self.fences)
        exposed = sum(fence.exposed for fence in self.fences)
        found = {"bytes": float(self.nbytes), "seconds": seconds, "hidden_seconds": max(0.0, seconds - exposed)}
        self.nbytes, self.fences = 0, []
        return found


class Parcel:
    """Args:
    name: for errors.
    section: uint8, host memory that is this parcel's alone.
    lane: runs the copies.
    join: let tensors that have a storage to themselves come back in another, small ones together in one: only for
        tensors of which nobody keeps views.
    verify: compare checksums of what left and what came back, which reads everything twice more.
    """

    def __init__(self, name: str, section: Tensor, lane: Lane, *, join: bool, verify: bool = False) -> None:
        self.name, self.section = name, section
        self._lane, self._join, self._verify = lane, join, verify
        self._pieces: list[_Piece] = []
        self._blocks: dict[int, Block] = {}
        """By address, those that tensors came back to."""
        self._fence: Fence | None = None
        self._returns: list[_Return] = []
        self._loan: Loan | None = None
        self._pages: threading.Thread | None = None
        self.where = Where.HERE
        self.out, self.back = Traffic(), Traffic()

    def leave(self, groups: Iterable[Sequence[Tensor]]) -> None:
        """Starts to copy these tensors' storages away; tensors of different groups are never joined.

        The tensors must be all that use their storages, and must not be written before they are back.
        Raises ParcelError where the section is too small for them.
        """
        if self.where in (Where.LEAVING, Where.AWAY):
            return
        self.wait()
        if self._loan is not None:
            self._loan.wait()
            self._loan = None
        pieces = _pieces(groups, self._blocks)
        end = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        if end > self.section.numel():
            raise ParcelError(
                f"{self.name}: {end} bytes are to leave the device, the arena's section has {self.section.numel()}: "
                "there is more than was planned for"
            )
        if self._verify:
            for piece in pieces:
                piece.checksum = checksum(whole(piece.storage))
        self._pieces = pieces
        self._blocks = {piece.block.address: piece.block for piece in pieces if piece.block is not None}
        self._fence = self._lane.copy([(self._slot(piece), whole(piece.storage)) for piece in pieces])
        self._count(self.out, self._fence)
        self.where = Where.LEAVING

    def lend(self, groups: Iterable[Sequence[Tensor]]) -> Loan:
        """Copies these tensors' storages away, and leaves them on the device as well.

        The loan's copies are whole when this returns. The section is written again, by what leaves once the tensors
        were used, only after the loan's end; see `leave` for what else holds.
        """
        self.leave(groups)
        if self.where is not Where.LEAVING:
            raise ParcelError(f"{self.name}: what is to be lent has left the device; bring it back first")
        assert self._fence is not None
        self._fence.wait()
        _ = self._fence.seconds  # it is the host that reads them: `wait` may hold a stream alone
        self._loan = Loan((piece.storage, self._slot(piece)) for piece in self._pieces)
        return self._loan

    def left(self) -> None:
        """Waits for the copies and frees the storages: they have 0 bytes afterwards."""
        if self.where is not Where.LEAVING:
            return
        assert self._fence is not None
        self._fence.wait()
        self.where = Where.AWAY
        for piece in self._pieces:
            piece.free()

    def come_back(self) -> None:
        """Gives the tensors memory and starts to copy back, in their order; they may be used after `wait`."""
        if self.where is Where.LEAVING:  # nothing was freed
            assert self._fence is not None
            self._fence.wait()
            self._pieces, self._fence, self.where = [], None, Where.HERE
        if self.where is not Where.AWAY:
            return
        runs = self._runs()
        pairs = [self._restored(run) for run in runs]
        fresh = [(target.data_ptr(), target.numel()) for target, _ in pairs if target.device.type == "cpu"]
        self._pages = populate_beside(fresh) if fresh else None
        self._returns = [_Return(run, self._lane.copy([pair])) for run, pair in zip(runs, pairs, strict=True)]
        self._count(self.back, *(each.fence for each in self._returns))
        self.where = Where.RETURNING

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Until these hold what they held when they left, while others may still be on their way."""
        self.come_back()
        if self._verify:
            self.wait()
        wanted = {id(tensor) for tensor in tensors}
        for each in self._returns:
            if any(id(tensor) in wanted for piece in each.run for tensor in piece.tensors):
                each.fence.wait()

    def wait(self) -> None:
        """Until the tensors hold what they held when they left. Raises ParcelError where `verify` finds otherwise."""
        self.come_back()
        if self.where is not Where.RETURNING:
            return
        for each in self._returns:
            each.fence.wait()
        if self._pages is not None:
            self._pages.join()
        self._returns, self._pages, self.where = [], None, Where.HERE
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            if piece.checksum is not None and not piece.checksum.equal(checksum(_bytes(piece.tensors[0], piece))):
                raise ParcelError(
                    f"{self.name}: {piece.nbytes} bytes came back from the arena otherwise than they left; something "
                    "writes into host memory that is not its own, or into tensors that are away"
                )

    def _slot(self, piece: _Piece) -> Tensor:
        return self.section[piece.offset : piece.offset + piece.nbytes]

    def _count(self, traffic: Traffic, *fences: Fence) -> None:
        traffic.nbytes += sum(piece.nbytes for piece in self._pieces)
        traffic.fences += fences

    def _runs(self) -> list[list[_Piece]]:
        """Pieces that come back together: neighbours in the arena, of one group, small, and free to be joined."""
        runs: list[list[_Piece]] = []
        for piece in self._pieces:
            if self._join and runs and _joins(runs[-1][-1]) and _joins(piece) and _fits(runs[-1], piece):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return runs

    def _restored(self, run: list[_Piece]) -> tuple[Tensor, Tensor]:
        """Where a run comes back to, and where it lies in the arena."""
        first, last = run[0], run[-1]
        length = last.offset + last.nbytes - first.offset
        return self._home(run, length), self.section[first.offset : first.offset + length]

    def _home(self, run: list[_Piece], nbytes: int) -> Tensor:
        """Memory for a run, of which its tensors are views."""
        device = run[0].tensors[0].device
        own = self._join and run[0].moves and device.type == "cpu"
        if len(run) == 1 and not own:
            return run[0].restore()
        if own:
            block = Block(nbytes)
            self._blocks[block.address] = block
            flat = block.memory()
        else:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for piece in run:
            (tensor,) = piece.tensors
            begin = piece.offset - run[0].offset
            tensor.data = flat[begin : begin + piece.nbytes].view(tensor.dtype).view(tensor.shape)
        return flat


def whole(storage: torch.UntypedStorage) -> Tensor:
    """A storage as flat uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def planned_bytes(groups: Iterable[Iterable[int]]) -> int:
    """Bytes of a section for groups of storages of these sizes."""
    return sum(ALIGNMENT + sum(map(_aligned, sizes)) for sizes in groups)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def checksum(data: Tensor) -> Tensor:
    """Sums, modulo 2^64, of the 8-byte words as they stand and weighted by their place: int64 `[2]`, where data is."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() % 8] = data[words.numel() * 8 :]
    sums = rest.view(torch.int64).repeat(2)
    for start in range(0, words.numel(), CHECKED):
        part = words[start : start + CHECKED]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=data.device)
        sums += torch.stack([part.sum(), (part * places).sum()])
    return sums


def _bytes(tensor: Tensor, piece: _Piece) -> Tensor:
    """The bytes of a piece, wherever they lie now."""
    storage = tensor.untyped_storage()
    if storage._cdata == piece.storage._cdata:
        return whole(storage)
    return whole(storage)[tensor.storage_offset() * tensor.element_size() :][: piece.nbytes]


def _joins(piece: _Piece) -> bool:
    return piece.moves and piece.nbytes < LARGE


def _fits(run: list[_Piece], piece: _Piece) -> bool:
    neighbours = run[-1].offset + _aligned(run[-1].nbytes) == piece.offset
    return neighbours and piece.offset + piece.nbytes - run[0].offset <= RUN


def _pieces(groups: Iterable[Sequence[Tensor]], blocks: Mapping[int, Block]) -> list[_Piece]:
    """The distinct storages in the order of their tensors; a gap in the arena parts the groups."""
    found: dict[int, _Piece] = {}
    end = 0
    for group in groups:
        for tensor in group:
            storage = tensor.untyped_storage()
            known = found.get(storage._cdata)
            if known is not None:
                known.tensors.append(tensor)
                known.moves = False
                continue
            nbytes = storage.nbytes()
            if not nbytes:
                continue
            block = blocks.get(storage.data_ptr())
            if block is None and not storage.resizable():
                # over memory that is not torch's, such as a file that a checkpoint was read of
                tensor.data = tensor.detach().clone()
                storage, nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
            alone = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes
            found[storage._cdata] = _Piece(storage, nbytes, end, [tensor], alone and block is None, block)
            end += _aligned(nbytes)
        end += ALIGNMENT
    return list(found.values())
