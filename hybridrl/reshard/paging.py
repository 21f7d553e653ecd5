"""A reshard whose source is given back as it drains, and whose destination is taken as it fills, page by page.

A compiled program is lists of things that run. Here the giving and taking are put in between, so that the executor need
not know: pages of the destination are taken just before the first write to them, pages of the source go right after the
last read. Local copies are cut small. What is also sent to others is copied when it is sent for the last time, since
its pages cannot go before; the rest is spread over the rounds, in the same order as what is received. So both sides
drain and fill alike, and what they hold together stays close to the larger of the two.

Addresses do not change, only what lies there. Pages that hold anything else, such as storage that both sides share,
stay.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.reshard.compile import Batch, CompiledRound, Program, Runnable
from hybridrl.reshard.storages import span

Bytes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Memory(Protocol):
    """Memory at addresses that stay, of which pages are taken and given back (`hybridrl.memory.region.Region`)."""

    address: int
    nbytes: int
    page_bytes: int

    @property
    def committed_bytes(self) -> int:
        """Bytes of the pages that are there."""

    def commit(self, start: int, stop: int) -> None:
        """Sees to it that a range, in bytes from `address`, has all of its pages."""

    def release(self, start: int, stop: int) -> None:
        """Gives the pages of a range back, each of which is there."""


class _Range(NamedTuple):
    """Bytes of a memory, whole pages."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Commit:
    """Takes the pages that are about to be written."""

    paging: "Paging"
    ranges: Sequence[_Range]

    def run(self) -> None:
        for start, stop in self.ranges:
            self.paging.destination.commit(start, stop)
        self.paging.note()


@dataclass(frozen=True)
class _Release:
    """Gives back the pages that have been read for the last time."""

    paging: "Paging"
    ranges: Sequence[_Range]

    def run(self) -> None:
        for start, stop in self.ranges:
            self.paging.source.release(start, stop)


class Paging:
    """Puts the taking and giving of pages into a program.

    Args:
        source, destination: the memories in which the two sides lie; tensors elsewhere are left alone. Before the
            program runs, the source has all of its pages; afterwards it has those of `kept` alone.
        kept: tensors whose pages stay, such as the shared ones.
        chunk_bytes: most bytes of local copies between one taking and the next giving.
        by_source: the order of local copies is that of the source's addresses, else of the destination's: whichever of
            the two lies in the order of the model's layers.
    """

    def __init__(
        self,
        source: Memory,
        destination: Memory,
        *,
        kept: Iterable[torch.Tensor] = (),
        chunk_bytes: int,
        by_source: bool = False,
    ) -> None:
        self.source, self.destination = source, destination
        self._kept = _Pages(source).touch(kept).flags()
        self._chunk_bytes = chunk_bytes
        self._by_source = by_source
        self.peak_bytes = 0
        """Most bytes of pages that both sides had at a time, in the last run."""

    def note(self) -> None:
        """Keeps the peak."""
        self.peak_bytes = max(self.peak_bytes, self.source.committed_bytes + self.destination.committed_bytes)

    def __call__(self, program: Program) -> Program:
        """The same program with pages taken and given back. It may run once for each time that the source is whole."""
        before, spread = self._spread(self._ordered(_cut_all(program.copies, self._chunk_bytes)), program.rounds)
        groups = [[one.pack, *chunks] for one, chunks in zip(program.rounds, spread, strict=True)]
        drained = iter(self._drained([*before, *(step for group in groups for step in group)]))
        copies: list[Runnable] = [_Start(self), _Release(self, next(drained))]
        for chunk in before:
            copies += self._step(chunk, next(drained))
        rounds = []
        for one, group in zip(program.rounds, groups, strict=True):
            pack = [part for step in group for part in self._step(step, next(drained))]
            rounds.append(replace(one, pack=tuple(pack), unpack=tuple(self._step(one.unpack))))
        return replace(
            program,
            copies=tuple(copies),
            fills=[],
            rounds=tuple(rounds),
            echoes=(self._commit(program.fills), _Zero(program.fills), *self._step(program.echoes)),
        )

    def _step(self, parts: Sequence[Runnable], drained: Sequence[_Range] = ()) -> Iterator[Runnable]:
        """Copies between the taking of what they write and the giving of what they are the last to read."""
        yield self._commit(tensor for batch in _batches(parts) for tensor in batch.writes)
        yield from parts
        yield _Release(self, drained)

    def _commit(self, tensors: Iterable[torch.Tensor]) -> _Commit:
        return _Commit(self, _Pages(self.destination).touch(tensors).ranges())

    def _drained(self, steps: Sequence[Sequence[Runnable]]) -> list[list[_Range]]:
        """Pages of the source that no step reads, and then those that each step is the last to read."""
        last = self._last_reads(steps)
        last[self._kept] = len(steps)
        return [_ranges(last == number, self.source.page_bytes) for number in range(-1, len(steps))]

    def _spread(
        self, parts: list["_Part"], rounds: Sequence[CompiledRound]
    ) -> tuple[list[list[Batch]], list[list[list[Batch]]]]:
        """Chunks of local copies, in their order, that run before the first round, and after each round is packed."""
        direct = sum(not one.relay for one in rounds)
        if not direct:
            return self._chunks(parts), [[] for _ in rounds]
        pages = _Pages(self.source)
        sent = self._last_reads([one.pack for one in rounds if not one.relay])
        ends = np.cumsum([part.write.nbytes for part in parts]).tolist()
        found: list[list[_Part]] = [[] for _ in rounds]
        for part, end in zip(parts, ends, strict=True):
            last = pages.most(sent, part.read)
            found[last if last >= 0 else (end - 1) * direct // ends[-1]].append(part)
        return [], [self._chunks(each) for each in found]

    def _last_reads(self, steps: Sequence[Sequence[Runnable]]) -> Bytes:
        """By page of the source, the last step that reads any of it, or -1."""
        last = np.full(len(self._kept), -1)
        for number, step in enumerate(steps):
            pages = _Pages(self.source).touch(tensor for batch in _batches(step) for tensor in batch.reads)
            last[pages.flags()] = number
        return last

    def _ordered(self, parts: list["_Part"]) -> list["_Part"]:
        """Local copies in the order of addresses."""
        return sorted(parts, key=lambda part: (part.read if self._by_source else part.write).data_ptr())

    def _chunks(self, parts: list["_Part"]) -> list[list[Batch]]:
        """Local copies as they come, at most `chunk_bytes` of them (or one row) together."""
        chunks: list[list[Batch]] = []
        groups: dict[object, Batch] = {}
        room = 0
        for part in parts:
            if part.write.nbytes > room:
                groups, room = {}, self._chunk_bytes
                chunks.append([])
            room -= part.write.nbytes
            if part.kind not in groups:
                groups[part.kind] = Batch([], [])
                chunks[-1].append(groups[part.kind])
            groups[part.kind].writes.append(part.write)
            groups[part.kind].reads.append(part.read)
        return chunks


class _Part(NamedTuple):
    """A local copy. Those of one kind, of dtypes and of whether both sides lie without gaps, can be one batch."""

    kind: tuple[torch.dtype, torch.dtype, bool]
    write: torch.Tensor
    read: torch.Tensor


@dataclass(frozen=True)
class _Zero:
    """Clears padding, at the end: nothing of the source goes for it."""

    tensors: list[torch.Tensor]

    def run(self) -> None:
        if self.tensors:
            torch._foreach_zero_(self.tensors)


@dataclass(frozen=True)
class _Start:
    """Forgets the peak of the run before."""

    paging: Paging

    def run(self) -> None:
        self.paging.peak_bytes = 0
        self.paging.note()


def _batches(parts: Iterable[Runnable]) -> Iterator[Batch]:
    """The copies of a compiled program."""
    for part in parts:
        if not isinstance(part, Batch):
            raise TypeError(f"{type(part).__name__} in a compiled program: only what it reads and writes can be paged")
        yield part


def _cut_all(copies: Iterable[Runnable], most: int) -> list[_Part]:
    """Local copies in parts of at most `most` bytes, or single elements."""
    return [
        _Part((read.dtype, write.dtype, read.is_contiguous() and write.is_contiguous()), *pair)
        for batch in _batches(copies)
        for write, read in zip(batch.writes, batch.reads, strict=True)
        for pair in _cut(write, read, most)
    ]


def _cut(write: torch.Tensor, read: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape in parts of at most `most` bytes, or single elements."""
    if write.nbytes <= most or write.numel() == 1:
        yield write, read
        return
    dim = next(d for d, size in enumerate(write.shape) if size > 1)
    rows = max(1, most * write.shape[dim] // write.nbytes)
    for part, other in zip(write.split(rows, dim), read.split(rows, dim), strict=True):
        yield from _cut(part, other, most)


class _Pages:
    """The pages of a memory that tensors touch."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._change: Bytes = np.zeros(memory.nbytes // memory.page_bytes + 1, np.int64)

    def touch(self, tensors: Iterable[torch.Tensor]) -> "_Pages":
        """Adds the pages of these; of those that lie elsewhere, none."""
        for tensor in tensors:
            first, last = self._runs(tensor)
            np.add.at(self._change, first, 1)
            np.add.at(self._change, last + 1, -1)
        return self

    def most(self, values: Bytes, tensor: torch.Tensor) -> int:
        """The largest value of the pages that a tensor touches; -1 where it lies elsewhere."""
        first, last = self._runs(tensor)
        if not len(first):
            return -1
        borders = np.stack([first, last + 1], 1).ravel()
        return int(np.maximum.reduceat(np.append(values, -1), borders)[::2].max())

    def _runs(self, tensor: torch.Tensor) -> tuple[Bytes, Bytes]:
        """The first and the last page of each piece of a tensor; none where it lies elsewhere."""
        memory, (start, stop) = self._memory, span(tensor)
        if not memory.address <= start < stop <= memory.address + memory.nbytes:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts, length = _pieces(tensor, memory.page_bytes)
        starts += start - memory.address
        return starts // memory.page_bytes, (starts + length - 1) // memory.page_bytes

    def flags(self) -> Flags:
        """Whether each page is touched."""
        touched: Flags = self._change.cumsum()[:-1] > 0
        return touched

    def ranges(self) -> list[_Range]:
        """The touched pages as ranges of bytes."""
        return _ranges(self.flags(), self._memory.page_bytes)


def _pieces(tensor: torch.Tensor, page_bytes: int) -> tuple[Bytes, int]:
    """Where pieces of one length start, in bytes from the tensor's first, that cover it without a whole page more."""
    item = tensor.element_size()
    length, starts = item, np.zeros(1, np.int64)
    dims = sorted((s * item, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    for stride, size in dims:
        if len(starts) == 1 and stride - length < page_bytes:  # no page lies in the gap alone
            length += stride * (size - 1)
        else:
            starts = (starts[:, None] + stride * np.arange(size)).ravel()
    return starts, length


def _ranges(wanted: Flags, page_bytes: int) -> list[_Range]:
    """Neighbouring pages as ranges of bytes."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)) * page_bytes
    return [_Range(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
