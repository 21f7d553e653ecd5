"""From a plan and live tensors to lists of views that copy themselves: all that is left for each sync to do.

Movements of one round are grouped by dtypes and by whether they are gapless, and each group is one call. The tensors'
own strides are respected, so that transposed parameters are as good as any.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from hybridrl.reshard.buffers import ALIGNMENT, Staging
from hybridrl.reshard.plan import Copy, Message, Plan, Round, View
from hybridrl.reshard.regions import Pair, Region, merge
from hybridrl.reshard.storages import Tensors
from hybridrl.reshard.transports.base import Exchange


class Runnable(Protocol):
    """A part of a program."""

    def run(self) -> None:
        """Does it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies of one pair of dtypes, converted where the two differ (to nearest even)."""

    writes: list[torch.Tensor]
    reads: list[torch.Tensor]

    def run(self) -> None:
        """One call, whatever the number of tensors."""
        torch._foreach_copy_(self.writes, self.reads)


@dataclass(frozen=True, slots=True)
class CompiledRound:
    """One round: what fills the send buffer, what goes where, what empties the receive buffer."""

    pack: tuple[Runnable, ...]
    exchange: Exchange
    unpack: tuple[Runnable, ...]
    relay: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A plan over live storage."""

    copies: tuple[Runnable, ...]
    fills: list[torch.Tensor]
    rounds: tuple[CompiledRound, ...]
    echoes: tuple[Runnable, ...]


class Compiler:
    """Compiles the parts of a plan for one rank.

    Args:
        plan: the rank's.
        source, destination: the rank's live tensors; every view of the plan must lie inside them (`view_problems`).
        staging: buffers of the plan's sizes.
        world: ranks of the group that exchanges.
        gather: on a CPU, rows that are converted are gathered first; without it each copy stands for itself, and all
            may run in any order.
    """

    def __init__(
        self, plan: Plan, source: Tensors, destination: Tensors, staging: Staging, world: int, *, gather: bool = True
    ) -> None:
        self.plan = plan
        self.source = {name: tensor.detach() for name, tensor in source.items()}
        self.destination = {name: tensor.detach() for name, tensor in destination.items()}
        self.staging = staging
        self.world = world
        self._gather = gather
        self._bases: dict[int, torch.Tensor] = {}
        self._keys: dict[tuple[int, torch.dtype], int] = {}

    def compile(self) -> Program:
        """All of the plan. Aliases whose two sides are not one storage become copies."""
        plan = self.plan
        copies = [self._pair(copy, self.source) for copy in plan.copies]
        for alias in plan.aliases:
            read, write = self.source[alias.source], self.destination[alias.destination]
            if read.data_ptr() != write.data_ptr():
                copies.append(Pair(self._region(read), self._region(write)))
        return Program(
            self._batches(copies),
            [self.destination[view.param][view.slices] for view in plan.fills],
            tuple(self._round(one, number) for number, one in enumerate(plan.rounds)),
            self._batches(self._pair(echo, self.destination) for echo in plan.echoes),
        )

    def _round(self, one: Round, number: int) -> CompiledRound:
        slot = number % len(self.staging.send)
        send, receive = self.staging.send[slot], self.staging.receive[slot]
        origin = self.destination if one.relay else self.source
        sent, arrived = partial(_departure, send), partial(self.staging.arrival, number)
        pack = [Pair(view, staged) for view, staged in self._staged(one.sends, origin, sent)]
        unpack = [Pair(staged, view) for view, staged in self._staged(one.receives, self.destination, arrived)]
        send_splits, receive_splits = self._splits(one.sends), self._splits(one.receives)
        exchange = Exchange(send[: sum(send_splits)], receive[: sum(receive_splits)], send_splits, receive_splits)
        return CompiledRound(self._batches(pack), exchange, self._batches(unpack), one.relay)

    def _staged(
        self, messages: Iterable[Message], tensors: Tensors, place: Callable[[Message], tuple[torch.Tensor, int]]
    ) -> Iterator[tuple[Region, Region]]:
        """Each segment's region in its parameter, and in the buffer in which its message lies."""
        for message in messages:
            buffer, offset = place(message)
            elements = {dtype: _elements(buffer, dtype) for dtype in _wire_dtypes(message)}
            for segment in message.segments:
                base = elements[torch_dtype(segment.wire_dtype)]
                start = (segment.offset - message.offset + offset) // base.itemsize
                yield self._view(tensors, segment.view), self._region(base[start : start + segment.view.size])

    def _splits(self, messages: Iterable[Message]) -> list[int]:
        """Bytes by rank; every message is rounded up to whole elements of the largest dtype, as the plan lays them."""
        item = self.plan.planner.item_bytes
        splits = [0] * self.world
        for message in messages:
            splits[message.peer] = -(-message.nbytes // item) * item
        return splits

    def _pair(self, copy: Copy, origin: Tensors) -> Pair:
        return Pair(self._view(origin, copy.source), self._view(self.destination, copy.destination))

    def _view(self, tensors: Tensors, view: View) -> Region:
        return self._region(tensors[view.param][view.slices])

    def _region(self, view: torch.Tensor) -> Region:
        place = (view.untyped_storage()._cdata, view.dtype)
        key = self._keys.setdefault(place, len(self._keys))
        self._bases.setdefault(key, view)
        return Region(key, int(view.storage_offset()), tuple(view.shape), view.stride())

    def _batches(self, pairs: Iterable[Pair]) -> tuple[Batch, ...]:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], Batch] = {}
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in merge(pairs):
            read, write = self._tensor(pair.read), self._tensor(pair.write)
            if not pair.read.dense and read.dtype != write.dtype and read.nbytes <= self._scratch(read).numel():
                rows.append((read, write))
                continue
            batch = groups.setdefault((read.dtype, write.dtype, pair.dense), Batch([], []))
            batch.reads.append(read)
            batch.writes.append(write)
        return (*groups.values(), *self._gathered(rows))

    def _scratch(self, read: torch.Tensor) -> torch.Tensor:
        """Where rows are gathered first: on a CPU, on which converting them in place of that took twice the time."""
        if not self._gather or read.device.type != "cpu":
            return torch.empty(0, dtype=torch.uint8)
        return self.staging.take_scratch(2 * self.plan.bucket_bytes)

    def _gathered(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Batch]:
        """As many reads as the scratch holds are gathered in it, and converted out of it, and so on."""
        start, scratch = 0, self.staging.scratch
        gather, convert = Batch([], []), Batch([], [])
        for read, write in rows:
            if start + read.nbytes > scratch.numel():
                yield from (gather, convert)
                start, gather, convert = 0, Batch([], []), Batch([], [])
            gathered = scratch[start : start + read.nbytes].view(read.dtype).view(read.shape)
            start += -(-read.nbytes // ALIGNMENT) * ALIGNMENT
            gather.writes.append(gathered)
            gather.reads.append(read)
            convert.writes.append(write)
            convert.reads.append(gathered)
        if rows:
            yield from (gather, convert)

    def _tensor(self, region: Region) -> torch.Tensor:
        return self._bases[region.storage].as_strided(region.sizes, region.strides, region.offset)


def view_problems(plan: Plan, source: Tensors, destination: Tensors) -> list[str]:
    """Views of the plan that lie outside a tensor, or have another dtype than it."""
    found: dict[str, None] = {}
    for side, tensors, views in (
        ("source", source, _source_views(plan)),
        ("destination", destination, _destination_views(plan)),
    ):
        for view in views:
            tensor = tensors.get(view.param)
            if tensor is None:
                found[f"{side} {view.param} is in the plan and not among the tensors"] = None
            elif tensor.dtype != torch_dtype(view.dtype):
                found[f"{side} {view.param} is {tensor.dtype}, the plan was made for {view.dtype}"] = None
            elif len(view.extent) != tensor.dim() or any(
                s.stop > n for s, n in zip(view.slices, tensor.shape, strict=True)
            ):
                found[f"{side} {view.param} has shape {list(tensor.shape)}, the plan uses {view.slices} of it"] = None
    return list(found)


def _source_views(plan: Plan) -> Iterator[View]:
    yield from (copy.source for copy in plan.copies)
    yield from (s.view for r in plan.rounds if not r.relay for m in r.sends for s in m.segments)


def _destination_views(plan: Plan) -> Iterator[View]:
    yield from (copy.destination for copy in plan.copies)
    yield from plan.fills
    yield from (s.view for r in plan.rounds if r.relay for m in r.sends for s in m.segments)
    yield from (s.view for r in plan.rounds for m in r.receives for s in m.segments)
    yield from (view for echo in plan.echoes for view in (echo.source, echo.destination))


@cache
def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for `bfloat16`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _wire_dtypes(message: Message) -> set[torch.dtype]:
    return {torch_dtype(segment.wire_dtype) for segment in message.segments}


def _departure(buffer: torch.Tensor, message: Message) -> tuple[torch.Tensor, int]:
    return buffer, message.offset


def _elements(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
