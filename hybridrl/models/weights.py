"""Logical weights: boxes, tensors, pieces and the weight map of a model.

A *tensor* is a weight as the model's Hugging Face checkpoint names and shapes it. Every framework stores *pieces* of
tensors inside parameters of its own; a piece says which box of the tensor lies where. Everything here is pure Python
and needs no torch, so that layouts can be asked about any rank of any world on any machine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

from hybridrl.models.spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Role(StrEnum):
    """What a tensor is in the model; a layout decides by role how it is cut."""

    EMBED = "embed"
    LM_HEAD = "lm_head"
    SCORE = "score"
    FINAL_NORM = "final_norm"
    INPUT_NORM = "input_norm"
    POST_ATTENTION_NORM = "post_attention_norm"
    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the field's name for the output projection
    Q_BIAS = "q_bias"
    K_BIAS = "k_bias"
    V_BIAS = "v_bias"
    O_BIAS = "o_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    Q_A = "q_a"
    Q_A_NORM = "q_a_norm"
    Q_B = "q_b"
    KV_A = "kv_a"
    KV_A_NORM = "kv_a_norm"
    KV_B = "kv_b"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    GATE_BIAS = "gate_bias"
    UP_BIAS = "up_bias"
    DOWN_BIAS = "down_bias"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    MTP_EMBED = "mtp_embed"
    MTP_EMBED_NORM = "mtp_embed_norm"
    MTP_HIDDEN_NORM = "mtp_hidden_norm"
    MTP_PROJ = "mtp_proj"
    MTP_HEAD_NORM = "mtp_head_norm"
    MTP_HEAD = "mtp_head"


EXPERT_ROLES = frozenset({Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN})


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open range per dimension: `start[d] <= index[d] < stop[d]`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Box":
        """The box of a whole tensor of this shape."""
        stop = tuple(shape)
        return cls((0,) * len(stop), stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; 0 for an empty box."""
        return prod(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The common box, or None where there is no common element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` is in this box."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))

    def narrow(self, dim: int, start: int, stop: int) -> "Box":
        """This box with dimension `dim` replaced by `[start, stop)`."""
        return Box((*self.start[:dim], start, *self.start[dim + 1 :]), (*self.stop[:dim], stop, *self.stop[dim + 1 :]))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical weight, named, shaped and typed as in the Hugging Face checkpoint.

    `layer` is the main layer's global index (MTP layers follow them), None outside the layers; `expert` is the global
    expert index, None for everything else.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    layer: int | None = None
    expert: int | None = None

    @property
    def box(self) -> Box:
        return Box.whole(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where it lies: it fills `param[offset[d] : offset[d] + extent[d], ...]`.

    A parameter may have more leading dimensions than the tensor (a stack of experts): the extent of those is 1, and
    the box's shape gives the extents of the trailing dimensions.
    """

    tensor: str
    box: Box
    param: str
    offset: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Extent in the parameter's own dimensions."""
        shape = self.box.shape
        return (1,) * (len(self.offset) - len(shape)) + shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes the parameter to a view of the box, in the parameter's dimensions."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))


@dataclass(frozen=True, slots=True)
class Param:
    """A framework's own parameter (or buffer) on one rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


class Kind(NamedTuple):
    """What tensors have in common that lie alike in every layout: large models have a few kinds and many tensors."""

    role: Role
    moe: bool | None
    """Whether its main layer has experts; None outside of the main layers."""
    predicts: bool
    """Whether it belongs to a prediction layer."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)


class WeightMap:
    """All tensors of a model, in layer order, found by name or by (role, layer, expert)."""

    def __init__(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> None:
        self.spec = spec
        self.tensors: tuple[Tensor, ...] = tuple(tensors)
        self._by_name = {t.name: t for t in self.tensors}
        self._by_place = {(t.role, t.layer, t.expert): t for t in self.tensors}
        if len(self._by_name) != len(self.tensors) or len(self._by_place) != len(self.tensors):
            raise ValueError(f"{spec.family}: two tensors of the weight map share a name or a place")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name; KeyError names it if the model has none."""
        return self._by_name[name]

    def find(self, role: Role, layer: int | None = None, expert: int | None = None) -> Tensor | None:
        """The tensor at that place, or None where this model has none."""
        return self._by_place.get((role, layer, expert))

    @cached_property
    def by_layer(self) -> Mapping[int | None, tuple[Tensor, ...]]:
        """Tensors by layer, in order; None holds those outside the layers."""
        layers: dict[int | None, list[Tensor]] = {}
        for tensor in self.tensors:
            layers.setdefault(tensor.layer, []).append(tensor)
        return {layer: tuple(tensors) for layer, tensors in layers.items()}

    @cached_property
    def kinds(self) -> Mapping[Kind, tuple[Tensor, ...]]:
        """Tensors by kind, in order."""
        found: dict[Kind, list[Tensor]] = {}
        for tensor in self.tensors:
            predicts = tensor.layer is not None and tensor.layer >= self.spec.num_layers
            moe = None if tensor.layer is None or predicts else self.spec.is_moe_layer(tensor.layer)
            found.setdefault(Kind(tensor.role, moe, predicts, tensor.shape), []).append(tensor)
        return {kind: tuple(tensors) for kind, tensors in found.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)
