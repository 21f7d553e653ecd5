"""The layout of a transformers (version 5) model in memory, which is not that of its files.

Experts are fused: `mlp.experts.gate_up_proj` is [experts, 2·ffn, hidden], gate rows before up rows, and
`mlp.experts.down_proj` is [experts, hidden, ffn]. A Mixtral's block is `mlp` in memory and `block_sparse_moe` in files.
A tied head has no parameter of its own.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from hybridrl.models.weights import EXPERT_ROLES, Param, Piece, Role, Tensor, WeightMap
from hybridrl.reshard.layout import Holder


class TransformersLayout:
    """The whole model on each of `ranks`, under the names of `model.named_parameters()` and persistent buffers.

    `dtype` is that of the parameters, None for each tensor's own; the router's correction bias keeps its own, and a
    router that has one is float32.
    """

    def __init__(self, weights: WeightMap, ranks: Sequence[int], *, dtype: str | None = None) -> None:
        self.weights = weights
        self.ranks: Sequence[int] = tuple(sorted(ranks))
        self.dtype = dtype

    def params(self, rank: int) -> Mapping[str, Param]:
        """See `Layout.params`; in the order of their first tensors."""
        self._check(rank)
        return self._params

    def pieces(self, rank: int) -> Sequence[Piece]:
        """See `Layout.pieces`."""
        self._check(rank)
        return [self._piece(t) for t in self.weights]

    def holders(self, tensor: str) -> Sequence[Holder]:
        """See `Layout.holders`."""
        return [Holder(self._piece(self.weights[tensor]), tuple(self.ranks))]

    @cached_property
    def _params(self) -> Mapping[str, Param]:
        found: dict[str, Param] = {}
        for tensor in self.weights:
            name = _name(tensor)
            if name not in found:
                found[name] = Param(name, self._shape(tensor), self._dtype(tensor))
        return found

    def _dtype(self, tensor: Tensor) -> str:
        moe = self.weights.spec.moe
        if tensor.role is Role.ROUTER and moe is not None and moe.correction_bias:
            return "float32"
        keeps = self.dtype is None or tensor.role is Role.ROUTER_BIAS
        return tensor.dtype if keeps else str(self.dtype)

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        if tensor.role not in EXPERT_ROLES:
            return tensor.shape
        moe = self.weights.spec.moe
        assert moe is not None
        rows, columns = tensor.shape
        return (moe.num_experts, rows if tensor.role is Role.EXPERT_DOWN else 2 * rows, columns)

    def _piece(self, tensor: Tensor) -> Piece:
        offset = (0,) * len(tensor.shape)
        if tensor.expert is not None:
            offset = (tensor.expert, tensor.shape[0] if tensor.role is Role.EXPERT_UP else 0, 0)
        return Piece(tensor.name, tensor.box, _name(tensor), offset)

    def _check(self, rank: int) -> None:
        if rank not in self.ranks:
            raise KeyError(f"rank {rank} is not among the {len(self.ranks)} ranks of this layout")


def _name(tensor: Tensor) -> str:
    if tensor.role not in EXPERT_ROLES:
        return tensor.name.replace(".block_sparse_moe.", ".mlp.")
    fused = "down_proj" if tensor.role is Role.EXPERT_DOWN else "gate_up_proj"
    return f"model.layers.{tensor.layer}.mlp.experts.{fused}"
