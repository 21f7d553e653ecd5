"""The baseline of `benchmarks/reshard.py`: every rank rebuilds whole tensors, bucket by bucket, and keeps its slices.

That is what slime, verl, ROLL and NeMo-RL do where trainer and engine share their ranks. Here it is done as well as it
can be: all views are made once, buffers are kept, all ranks give to each bucket at the same time and without padding,
replicas share the giving evenly, and nothing is pickled or gathered as an object. Broadcasts from all ranks at once are
what gloo does fastest here (its all-gather took three times as long).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.reshard_methods import Sides
from hybridrl.models.weights import Box, Piece, Tensor
from hybridrl.reshard.golden import box_slices
from hybridrl.reshard.layout import Holder

ALIGNMENT = 8

Parts = list[tuple[Tensor, list[tuple[Piece, int]]]]
"""Tensors, each with the boxes that it is made of and the rank that gives each."""


@dataclass
class Copies:
    """Views to write and to read, in pairs."""

    writes: list[torch.Tensor] = field(default_factory=list)
    reads: list[torch.Tensor] = field(default_factory=list)

    def add(self, write: torch.Tensor, read: torch.Tensor) -> None:
        self.writes.append(write)
        self.reads.append(read.view(write.shape))

    def run(self) -> None:
        if self.writes:
            torch._foreach_copy_(self.writes, self.reads)


@dataclass
class Bucket:
    """The copies of one bucket: into the send buffer, into whole tensors, into the destination."""

    arrived: list[torch.Tensor]
    """What each rank gives; this rank's own part is its send buffer."""
    pack: Copies = field(default_factory=Copies)
    rebuild: Copies = field(default_factory=Copies)
    cut: Copies = field(default_factory=Copies)


class GatherMethod:
    """See the module's text."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.world = dist.get_world_size()
        self._dtypes: dict[tuple[int, str], torch.dtype] = {}
        wanted: dict[str, list[Piece]] = {}
        for piece in sides.destination.pieces(sides.rank) if sides.rank in sides.destination.ranks else ():
            wanted.setdefault(piece.tensor, []).append(piece)
        groups = self._groups()
        given = [self._given(parts) for parts in groups]
        whole = max(sum(self._size(tensor.box, *boxes[0]) for tensor, boxes in parts) for parts in groups)
        self._gathered, self._whole = (
            torch.zeros(size, dtype=torch.uint8, device=sides.device) for size in (max(map(sum, given)), whole)
        )
        self.staging_bytes: int | None = self._gathered.numel() + self._whole.numel()
        self.received_bytes = sum(sum(sizes) - sizes[sides.rank] for sizes in given)
        self._buckets = [self._compile(parts, sizes, wanted) for parts, sizes in zip(groups, given, strict=True)]

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """One sync."""
        start = self.sides.clock()
        for bucket in self._buckets:
            bucket.pack.run()
            works = [
                dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(bucket.arrived) if part.numel()
            ]
            for work in works:
                work.wait()
            bucket.rebuild.run()
            bucket.cut.run()
        return {"total": self.sides.clock() - start}

    def _groups(self) -> list[Parts]:
        """Tensors by bucket; of replicas, the one that has the least to give so far gives."""
        source = self.sides.source
        loads = [0] * self.world
        groups: list[Parts] = []
        room = 0
        for tensor in self._spread():
            boxes: dict[Box, Holder] = {holder.piece.box: holder for holder in source.holders(tensor.name)}
            owned = []
            for holder in boxes.values():
                owner = min(holder.ranks, key=loads.__getitem__)
                loads[owner] += self._size(holder.piece.box, holder.piece, owner)
                owned.append((holder.piece, owner))
            size = self._size(tensor.box, *owned[0])
            if size > room:
                groups.append([])
                room = self.sides.bucket_bytes
            groups[-1].append((tensor, owned))
            room -= size
        return groups

    def _spread(self) -> list[Tensor]:
        """Tensors in an order in which the ranks that hold them take turns: all ranks give to every bucket."""
        by_ranks: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor in self.sides.source.weights:
            ranks = {rank for holder in self.sides.source.holders(tensor.name) for rank in holder.ranks}
            by_ranks.setdefault(tuple(sorted(ranks)), []).append(tensor)
        turns = [((i + 0.5) / len(own), own[i]) for own in by_ranks.values() for i in range(len(own))]
        return [tensor for _, tensor in sorted(turns, key=lambda turn: turn[0])]

    def _given(self, parts: Parts) -> list[int]:
        """Bytes that each rank gives."""
        given = [0] * self.world
        for _, boxes in parts:
            for piece, owner in boxes:
                given[owner] += self._size(piece.box, piece, owner)
        return given

    def _compile(self, parts: Parts, given: Sequence[int], wanted: Mapping[str, Sequence[Piece]]) -> Bucket:
        sides = self.sides
        bucket = Bucket(list(self._gathered[: sum(given)].split(list(given))))
        used = [0] * self.world
        at = 0
        for tensor, boxes in parts:
            dtype = self._dtype(*boxes[0])
            whole = _view(self._whole, at, tensor.shape, dtype)
            at += self._size(tensor.box, *boxes[0])
            for piece, owner in boxes:
                arrived = _view(bucket.arrived[owner], used[owner], piece.box.shape, dtype)
                used[owner] += self._size(piece.box, piece, owner)
                bucket.rebuild.add(whole[box_slices(piece.box)], arrived)
                if owner == sides.rank:
                    bucket.pack.add(arrived, sides.trained[piece.param].detach()[piece.slices])
            for piece in wanted.get(tensor.name, ()):
                bucket.cut.add(sides.served[piece.param].detach()[piece.slices], whole[box_slices(piece.box)])
        return bucket

    def _dtype(self, piece: Piece, rank: int) -> torch.dtype:
        if (rank, piece.param) not in self._dtypes:
            params = self.sides.source.params(rank)
            self._dtypes |= {(rank, name): getattr(torch, param.dtype) for name, param in params.items()}
        return self._dtypes[rank, piece.param]

    def _size(self, box: Box, piece: Piece, rank: int) -> int:
        """Bytes of a box in the buffers."""
        return -(-box.size * self._dtype(piece, rank).itemsize // ALIGNMENT) * ALIGNMENT


def _view(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = Box.whole(shape).size * dtype.itemsize
    return buffer[start : start + size].view(dtype).view(*shape)
