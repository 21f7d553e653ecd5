"""How parameters in the engine's layout go into Megatron's distributed checkpoint: as the tensors Megatron writes.

So a checkpoint of either parameter layout loads into the other, over other parallel sizes too. Experts are one tensor a
projection with the global expert as an axis, gate and up rows sharded each by itself; the fused projection of attention
is interleaved by key-value group, and is written and read head by head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

Metadata = dict[str, Any] | None
EXTRA = "_extra_state."
"""What names of entries begin with that hold nothing, and are to be left out on loading."""
Offset = tuple[int, int, int]
"""An axis of the whole tensor, the index of this part along it, and the number of parts."""


@dataclass(frozen=True)
class Stack:
    """A rank's place among those that hold a layer's experts, and how checkpoint keys and axes begin there."""

    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    edp: dist.ProcessGroup
    prefix: str
    outer: tuple[Offset, ...]


class Heads(NamedTuple):
    """The heads of a layer, and of this rank's fused projection: `tp` ranks have a part each.

    With more ranks than key-value heads, each of those is on `copies` ranks in a row.
    """

    queries: int
    groups: int
    size: int
    tp: int
    rank: int

    @property
    def copies(self) -> int:
        return max(1, self.tp // self.groups)

    @property
    def local_queries(self) -> int:
        return self.queries // self.tp

    @property
    def local_groups(self) -> int:
        return max(1, self.groups // self.tp)

    def interleaved(self) -> list[tuple[int, int]]:
        """For each local head, queries before keys before values: its index in Megatron's order, and which copy it is.

        Megatron's order is, for each key-value group: its query heads, its key head, its value head.
        """
        share = self.queries // self.groups
        first = self.rank * self.local_queries
        found = [(q // share * (share + 2) + q % share, 0) for q in range(first, first + self.local_queries)]
        start = self.rank * self.groups // self.tp
        for kind in (share, share + 1):
            held = range(start, start + self.local_groups)
            found += [(group * (share + 2) + kind, self.rank % self.copies) for group in held]
        return found


def experts_state_dict(w13: torch.Tensor, w2: torch.Tensor, stack: Stack, metadata: Metadata) -> dict[str, Any]:
    """Entries of the stacked parameters (see `StackedExperts`), by their names in the model's state dict.

    Raises ValueError for checkpoints with a key for each expert (`singleton_local_shards`).
    """
    if (metadata or {}).get("singleton_local_shards", False):
        raise ValueError(
            "singleton_local_shards writes a key for each expert, stacked experts one for all: leave it out, or train "
            "with model.parameter_layout=megatron"
        )
    axis, copy = len(stack.outer), stack.edp.rank()
    experts = (axis, stack.ep.rank(), stack.ep.size())
    halves = stack.etp.size()

    def split(key: str, tensor: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [
            _shard(key, half, stack.outer, experts, (axis + 1, stack.etp.rank() + i * halves, 2 * halves), copy=replica)
            for i, half in enumerate(tensor.chunk(2, dim=1))
        ]

    def join(halves: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tuple(halves), dim=1)

    names = [f"{stack.prefix}experts.linear_fc{i}.weight" for i in (1, 2)]
    columns = (axis + 2, stack.etp.rank(), stack.etp.size())
    return {
        **_extra_states(len(w13), stack),
        f"{stack.prefix}w13": ShardedTensorFactory(names[0], w13, split, join, (0, 0, copy)),
        f"{stack.prefix}w2": _shard(names[1], w2, stack.outer, experts, columns, copy=(0, 0, copy)),
    }


def _extra_states(local: int, stack: Stack) -> dict[str, Any]:
    """What Megatron's own experts write beside their weights, which is nothing, and insist on reading."""
    count, first = local * stack.ep.size(), local * stack.ep.rank()
    replica = (0, stack.etp.rank(), stack.edp.rank())
    return {
        f"{stack.prefix}{EXTRA}{name}.{expert}": make_sharded_object_for_checkpoint(
            None,
            f"{stack.prefix}experts.{name}._extra_state",
            (*stack.outer, (len(stack.outer), first + expert, count)),
            replica,
        )
        for name in ("linear_fc1", "linear_fc2")
        for expert in range(local)
    }


def heads_factory(plain: ShardedTensor, heads: Heads, outer: tuple[Offset, ...]) -> ShardedTensorFactory:
    """A fused projection's weight or bias as its heads, each at its place in Megatron's order.

    Args:
        plain: what a column-parallel layer would write, of which key, data and replica are used.
        heads: the layer's.
        outer: offsets that were given for axes before the parameter's own.
    """
    total = heads.queries + 2 * heads.groups

    def split(key: str, tensor: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [
            _shard(key, rows, outer, (len(outer), index, total), copy=(replica[0], copy, replica[2]))
            for rows, (index, copy) in zip(tensor.split(heads.size), heads.interleaved(), strict=True)
        ]

    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] = torch.cat  # type: ignore[assignment]
    return ShardedTensorFactory(plain.key, plain.data, split, join, plain.replica_id)


def _shard(key: str, data: torch.Tensor, outer: tuple[Offset, ...], *inner: Offset, copy: Any) -> ShardedTensor:
    contiguous = data if isinstance(data, torch.nn.Parameter) else data.contiguous()
    return ShardedTensor.from_rank_offsets(
        key, contiguous, *outer, *inner, replica_id=copy, prepend_axis_num=len(outer)
    )
