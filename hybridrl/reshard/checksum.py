"""Checksums after a sync: that what a rank holds is, bit for bit, what its sources hold.

Each segment of each message has two sums over its elements' bits, as its sender holds them and as its receiver holds
them after the sync, in the dtype that they travelled in; the second sum weighs each element by its place, so that
exchanged elements are found too. Local copies, echoes and padding are compared themselves. Nothing of the sync's own
buffers is used: an error of packing, of the wire, of unpacking or of a later write is found alike.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hybridrl.reshard.compile import torch_dtype
from hybridrl.reshard.plan import Copy, Plan, Segment, View
from hybridrl.reshard.storages import Tensors, device_of

CHUNK = 2**20
"""Elements summed at a time: what a check needs beside the weights is some multiple of this."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ChecksumError(RuntimeError):
    """Weights that are not what was sent; `problems` has a line for each differing part."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(["the weights that arrived are not those that were sent", *problems]))


class Checker:
    """Checks one rank's share of a reshard. All ranks make theirs and call them together."""

    def __init__(self, plan: Plan, source: Tensors, destination: Tensors) -> None:
        self._plan = plan
        self._source = source
        self._destination = destination
        self._device = device_of(source, destination)

    @torch.no_grad()
    def __call__(self) -> None:
        """Raises ChecksumError on the ranks where something differs. Collective."""
        problems = [*self._local_problems(), *self._received_problems()]
        if problems:
            raise ChecksumError(problems)

    def _local_problems(self) -> Iterator[str]:
        for origin, copies in ((self._source, self._plan.copies), (self._destination, self._plan.echoes)):
            for copy in copies:
                if not self._same(copy, origin):
                    yield f"{_name(copy.destination)} differs from this rank's own {_name(copy.source)}"
        for alias in self._plan.aliases:
            if not _equal(self._source[alias.source], self._destination[alias.destination]):
                yield f"{alias.destination} differs from this rank's own {alias.source}"
        for view in self._plan.fills:
            if self._destination[view.param][view.slices].count_nonzero():
                yield f"padding of {_name(view)} is not zero"

    def _same(self, copy: Copy, origin: Tensors) -> bool:
        here = self._destination[copy.destination.param][copy.destination.slices]
        there = origin[copy.source.param][copy.source.slices]
        return _equal(there.to(here.dtype).reshape(here.shape), here)

    def _received_problems(self) -> list[str]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return []
        sent, send_splits = self._sums(sending=True)
        held, receive_splits = self._sums(sending=False)
        told = torch.empty_like(held)
        dist.all_to_all_single(told, sent, receive_splits, send_splits)
        differs = (told != held).any(1).tolist()
        names = [(peer, _name(segment.view)) for peer, _, segment in _segments(self._plan, sending=False)]
        return [
            f"{name} differs from what rank {peer} holds"
            for (peer, name), wrong in zip(names, differs, strict=True)
            if wrong
        ]

    def _sums(self, *, sending: bool) -> tuple[torch.Tensor, list[int]]:
        """[segments, 2] int64 in the order of peers, and how many segments each peer has."""
        splits = [0] * dist.get_world_size()
        sums = []
        for peer, relay, segment in _segments(self._plan, sending=sending):
            tensors = self._source if sending and not relay else self._destination
            sums.append(_sum(tensors[segment.view.param][segment.view.slices], torch_dtype(segment.wire_dtype)))
            splits[peer] += 1
        none = torch.zeros((0, 2), dtype=torch.int64, device=self._device)
        return torch.stack(sums) if sums else none, splits


def _segments(plan: Plan, *, sending: bool) -> list[tuple[int, bool, Segment]]:
    """Peer, whether it is a relay, and segment, of all messages in the order of peers and then of rounds."""
    found = [
        (message.peer, one.relay, segment)
        for one in plan.rounds
        for message in (one.sends if sending else one.receives)
        for segment in message.segments
    ]
    return sorted(found, key=lambda item: item[0])


def _sum(view: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """[2] int64: the bits of the elements as `wire`, summed, and summed times their place; both wrap around."""
    total = torch.zeros(2, dtype=torch.int64, device=view.device)
    place = 0
    for rows in _chunks(view):
        bits = rows.to(wire).contiguous().view(BITS[wire.itemsize]).flatten().long()
        places = torch.arange(place + 1, place + 1 + bits.numel(), device=view.device)
        total += torch.stack([bits.sum(), (bits * places).sum()])
        place += bits.numel()
    return total


def _chunks(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """The view in pieces of about CHUNK elements, by its first dimension that has more than one."""
    while view.dim() > 1 and view.shape[0] == 1:
        view = view[0]
    rows = max(1, CHUNK * view.shape[0] // max(1, view.numel()))
    yield from view.split(rows)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits: NaN equals itself, and 0 is not -0."""
    bits = BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def _name(view: View) -> str:
    return f"{view.param}[{', '.join(f'{s.start}:{s.stop}' for s in view.slices)}]"
