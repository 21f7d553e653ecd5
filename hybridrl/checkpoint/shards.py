"""A model and its optimizer as sharded tensors of Megatron's distributed checkpoint, by the names of the weight map.

A checkpoint holds whole tensors with the model's Hugging Face names and shapes: `policy.weight.<tensor>`,
`policy.master.<tensor>`, `policy.exp_avg.<tensor>`. Which boxes of them a rank has follows from its layout, so any
layout reads what any other wrote: other parallel sizes, the other parameter layout, another optimizer's sharding. No
rank gathers what another holds, and padding is not written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from hybridrl.checkpoint.optimizer_state import Slot, slots
from hybridrl.checkpoint.ranges import boxes_of_range, part_of_tensor
from hybridrl.models.weights import Box, Piece
from hybridrl.reshard.layout import Layout

WEIGHT = "weight"
Shards = dict[str, list[ShardedTensor]]
"""Local shards by the key of the whole tensor."""


@dataclass(frozen=True)
class Model:
    """A model that is saved: `name` begins its keys.

    `tensors` returns the live parameters and buffers by the layout's names; `optimizer` the parts of Megatron's chained
    optimizer, none for a model that is not trained.
    """

    name: str
    layout: Layout
    rank: int
    tensors: Callable[[], Mapping[str, torch.Tensor]]
    optimizer: Sequence[Any] = ()

    def weights(self, *, owned: bool) -> Shards:
        """This rank's weights; with `owned` only those that this rank is to write, each element of all ranks once."""
        params, found = self.tensors(), Shards()
        for piece in self._pieces:
            if not owned or self._replicas(piece)[self._index(piece) % len(self._replicas(piece))] == self.rank:
                self._add(found, WEIGHT, piece, piece.box, params[piece.param][piece.slices])
        return found

    def optimizer_state(self, *, owned: bool) -> Shards:
        """Masters and moments, in the same way."""
        found = Shards()
        by_param: dict[str, list[Piece]] = {}
        for piece in self._pieces:
            by_param.setdefault(piece.param, []).append(piece)
        for slot in slots(self.optimizer, self.tensors()):
            values = {kind: value.reshape(-1) for kind, value in slot.values().items()}
            boxes = list(boxes_of_range(slot.shape, slot.start, slot.stop))
            for piece in by_param.get(slot.param, ()):  # none where a rank has nothing but padding
                if owned and not self._writes(piece, slot):
                    continue
                for place, part, view in _parts(piece, boxes, slot.start):
                    for kind, value in values.items():
                        self._add(found, kind, piece, place, value[part[0] : part[1]].view(view[0])[view[1]])
        return found

    @cached_property
    def _pieces(self) -> Sequence[Piece]:
        return self.layout.pieces(self.rank)

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {tensor.name: index for index, tensor in enumerate(self.layout.weights)}

    @cached_property
    def _found_replicas(self) -> dict[tuple[str, Box], tuple[int, ...]]:
        return {}

    def _index(self, piece: Piece) -> int:
        return self._positions[piece.tensor]

    def _replicas(self, piece: Piece) -> tuple[int, ...]:
        """All ranks that hold the piece's box, ascending."""
        key = (piece.tensor, piece.box)
        if key not in self._found_replicas:
            holders = [holder for holder in self.layout.holders(piece.tensor) if holder.piece.box == piece.box]
            self._found_replicas[key] = tuple(sorted({rank for holder in holders for rank in holder.ranks}))
        return self._found_replicas[key]

    def _writes(self, piece: Piece, slot: Slot) -> bool:
        """Whether this rank writes the slot's part of the piece. Ranks that share a parameter out write all of it
        together, where theirs is the first replica; else replicas take turns by tensor."""
        replicas = self._replicas(piece)
        if slot.leader is not None:
            return replicas[0] == slot.leader
        return replicas[self._index(piece) % len(replicas)] == self.rank

    def _add(self, found: Shards, kind: str, piece: Piece, box: Box, data: torch.Tensor) -> None:
        key = f"{self.name}.{kind}.{piece.tensor}"
        shape = self.layout.weights[piece.tensor].shape
        shard = ShardedTensor(
            key, data.view(box.shape), data.dtype, box.shape, shape, box.start, axis_fragmentations=None
        )
        found.setdefault(key, []).append(shard)


def _parts(
    piece: Piece, boxes: Sequence[tuple[int, Box]], start: int
) -> Iterator[tuple[Box, tuple[int, int], tuple[tuple[int, ...], tuple[slice, ...]]]]:
    """What of a piece lies in boxes of its parameter's flat range, which begins at `start`.

    Yields the box in the tensor; the bounds in the range of the box that holds it; the shape of that one, and the
    slices in it.
    """
    for flat, box in boxes:
        if (found := part_of_tensor(piece, box)) is not None:
            place, common = found
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(common.start, common.stop, box.start, strict=True))
            yield place, (flat - start, flat - start + box.size), (box.shape, inside)
