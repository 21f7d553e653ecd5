"""Slabs: a framework's parameter before it is cut, as segments of tensors laid one after another.

Every tensor-parallel parameter that fuses, interleaves, pads or replicates tensors can be written this way: lay
segments of tensors along one dimension and cut the whole into equal shards. Fused QKV is `q heads of group 0, its k,
its v, q heads of group 1, …`; fused gate and up is `gate rows of shard 0, its up rows, gate rows of shard 1, …`; a
padded vocabulary ends with a segment of no tensor. Where a cut falls inside a segment, the shard has part of it: no
assumption is made that a shard holds whole heads. Pure data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybridrl.models.weights import Box, Role


class Segment(NamedTuple):
    """Rows (or columns) `[start, stop)` of the tensor with this role; a role of None is padding."""

    role: Role | None
    start: int
    stop: int


class Cut(NamedTuple):
    """A box of a tensor and where it starts in a shard of the parameter."""

    box: Box
    offset: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A parameter of which each shard takes an equal part of `segments`, along `dim`.

    `rest` are the parameter's other dimensions in order; `{expert}` in the name stands for a local expert index.
    """

    name: str
    segments: tuple[Segment, ...]
    rest: tuple[int, ...] = ()
    dim: int = 0
    shards: int = 1
    expert: bool = False
    """Cut over the expert world, and of one expert."""
    dtype: str | None = None
    """A dtype that the parameter has whatever the model's is."""

    def __post_init__(self) -> None:
        if self.length % self.shards:
            raise ValueError(f"{self.name}: {self.shards} shards do not divide its length of {self.length}")

    @property
    def length(self) -> int:
        """Rows of all shards together."""
        return sum(s.stop - s.start for s in self.segments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one shard."""
        return (*self.rest[: self.dim], self.length // self.shards, *self.rest[self.dim :])

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles that lie in it, each once."""
        return tuple(dict.fromkeys(s.role for s in self.segments if s.role is not None))

    def whole_shape(self, role: Role) -> tuple[int, ...]:
        """Shape that the tensor of this role must have."""
        rows = sum(s.stop - s.start for s in set(self.segments) if s.role is role)
        return (*self.rest[: self.dim], rows, *self.rest[self.dim :])

    @cached_property
    def repeats(self) -> bool:
        """Whether several shards have the same rows of a tensor."""
        stored = [s for s in self.segments if s.role is not None]
        return len(set(stored)) < len(stored)

    @cached_property
    def cuts(self) -> Mapping[Role, Sequence[tuple[Cut, ...]]]:
        """By role and shard, the boxes that the shard holds, in the order of the tensor's rows."""
        size = self.length // self.shards
        found: dict[Role, list[list[Cut]]] = {role: [[] for _ in range(self.shards)] for role in self.roles}
        at = 0
        for role, start, stop in self.segments:
            end = at + stop - start
            while role is not None and at < end:
                shard = at // size
                upto = min(end, (shard + 1) * size)
                rows = start + upto - at
                found[role][shard].append(self._cut(start, rows, at - shard * size))
                start, at = rows, upto
            at = end
        return {role: [tuple(cuts) for cuts in shards] for role, shards in found.items()}

    def _cut(self, start: int, stop: int, offset: int) -> Cut:
        around = Box.whole((*self.rest[: self.dim], 0, *self.rest[self.dim :]))
        return Cut(around.narrow(self.dim, start, stop), around.narrow(self.dim, offset, offset).start)


def whole(name: str, role: Role, shape: tuple[int, ...], dtype: str | None = None) -> Slab:
    """A parameter that every rank holds whole."""
    return Slab(name=name, segments=(Segment(role, 0, shape[0]),), rest=shape[1:], dtype=dtype)


def rows(name: str, role: Role, shape: tuple[int, ...], shards: int, *, padded: int = 0, expert: bool = False) -> Slab:
    """Rows cut evenly, after padding to `padded` rows where that is more."""
    segments = [Segment(role, 0, shape[0])] + ([Segment(None, shape[0], padded)] if padded > shape[0] else [])
    return Slab(name=name, segments=tuple(segments), rest=shape[1:], shards=shards, expert=expert)


def columns(name: str, role: Role, shape: tuple[int, int], shards: int, *, expert: bool = False) -> Slab:
    """Columns cut evenly."""
    return Slab(name=name, segments=(Segment(role, 0, shape[1]),), rest=shape[:1], dim=1, shards=shards, expert=expert)


def stacked(
    name: str, roles: Sequence[Role], size: int, rest: tuple[int, ...], shards: int, *, expert: bool = False
) -> Slab:
    """Each tensor of `size` rows is cut evenly; a shard is its part of every tensor, one after another.

    Raises ValueError where `shards` does not divide `size`: the halves of such a shard would be misplaced silently.
    """
    part, over = divmod(size, shards)
    if over:
        raise ValueError(f"{name}: {shards} shards do not divide {size} rows of each of {', '.join(roles)}")
    segments = tuple(Segment(role, i * part, (i + 1) * part) for i in range(shards) for role in roles)
    return Slab(name=name, segments=segments, rest=rest, shards=shards, expert=expert)


def attention_rows(
    name: str, roles: Sequence[Role], heads: int, kv_heads: int, head_dim: int, rest: tuple[int, ...], shards: int
) -> Slab:
    """Each shard is its query heads, then its key heads, then its value heads; with more shards than key heads, each
    key and value head is on `shards / kv_heads` shards in a row."""
    q_rows = heads // shards * head_dim
    kv_rows = max(1, kv_heads // shards) * head_dim
    copies = max(1, shards // kv_heads)
    segments = []
    for shard in range(shards):
        kv = shard // copies
        segments.append(Segment(roles[0], shard * q_rows, (shard + 1) * q_rows))
        segments += [Segment(role, kv * kv_rows, (kv + 1) * kv_rows) for role in roles[1:]]
    return Slab(name=name, segments=tuple(segments), rest=rest, shards=shards)


def interleaved(
    name: str, roles: Sequence[Role], sizes: Sequence[int], groups: int, rest: tuple[int, ...], shards: int
) -> Slab:
    """For each group, `sizes` rows of each tensor; then cut by rows, wherever that falls."""
    segments = tuple(
        Segment(role, group * size, (group + 1) * size)
        for group in range(groups)
        for role, size in zip(roles, sizes, strict=True)
    )
    return Slab(name=name, segments=segments, rest=rest, shards=shards)
