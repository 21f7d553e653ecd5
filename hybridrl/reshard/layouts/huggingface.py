"""The layout of a Hugging Face checkpoint's names: every rank holds every tensor whole, under its own name."""

from collections.abc import Mapping, Sequence

from hybridrl.models.weights import Param, Piece, Tensor, WeightMap
from hybridrl.reshard.layout import Holder


class HuggingFaceLayout:
    """Whole tensors on each of `ranks`, in `dtype`, or each in its own where that is None."""

    def __init__(self, weights: WeightMap, ranks: Sequence[int], *, dtype: str | None = None) -> None:
        self.weights = weights
        self.ranks: Sequence[int] = tuple(sorted(ranks))
        self.dtype = dtype

    def params(self, rank: int) -> Mapping[str, Param]:
        """See `Layout.params`."""
        self._check(rank)
        return {t.name: Param(t.name, t.shape, self.dtype or t.dtype) for t in self.weights}

    def pieces(self, rank: int) -> Sequence[Piece]:
        """See `Layout.pieces`."""
        self._check(rank)
        return [_piece(t) for t in self.weights]

    def holders(self, tensor: str) -> Sequence[Holder]:
        """See `Layout.holders`."""
        return [Holder(_piece(self.weights[tensor]), tuple(self.ranks))]

    def _check(self, rank: int) -> None:
        if rank not in self.ranks:
            raise KeyError(f"rank {rank} is not among the {len(self.ranks)} ranks of this layout")


def _piece(tensor: Tensor) -> Piece:
    return Piece(tensor.name, tensor.box, tensor.name, (0,) * len(tensor.shape))
