"""Layouts without rhyme or reason: tensors cut anywhere, boxes on any ranks, in stacks, with padding, held twice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st

from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Box, Param, Piece, Role, Tensor, WeightMap
from hybridrl.reshard.layout import Holder

SPEC = ModelSpec(
    family="random",
    num_layers=1,
    hidden_size=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    ffn_size=1,
    vocab_size=1,
    tied=False,
    norm_eps=0.0,
    rope_theta=1.0,
    max_positions=1,
)


@dataclass
class ListedLayout:
    """A layout that is a list of holders and parameters."""

    weights: WeightMap
    ranks: Sequence[int]
    shapes: dict[str, Param] = field(default_factory=dict)
    listed: dict[str, list[Holder]] = field(default_factory=dict)

    def add(self, tensor: str, box: Box, param: Param, offset: tuple[int, ...], ranks: Sequence[int]) -> None:
        """Places a box in a parameter on these ranks."""
        self.shapes[param.name] = param
        self.listed.setdefault(tensor, []).append(Holder(Piece(tensor, box, param.name, offset), tuple(ranks)))

    def params(self, rank: int) -> Mapping[str, Param]:
        return {p.param: self.shapes[p.param] for p in self.pieces(rank)}

    def pieces(self, rank: int) -> Sequence[Piece]:
        return [h.piece for t in self.weights for h in self.holders(t.name) if rank in h.ranks]

    def holders(self, tensor: str) -> Sequence[Holder]:
        return self.listed.get(tensor, [])


@st.composite
def weight_maps(draw: st.DrawFn) -> WeightMap:
    """One to four tensors of up to three dimensions."""
    shapes = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4))
    return WeightMap(SPEC, [Tensor(f"t{i}", tuple(shape), "bfloat16", Role.Q, i) for i, shape in enumerate(shapes)])


def _cells(draw: st.DrawFn, tensor: Tensor) -> list[Box]:
    boxes = [tensor.box]
    for dim, extent in enumerate(tensor.shape):
        places = sorted(draw(st.sets(st.integers(1, extent), max_size=2)) - {extent})
        borders = [0, *places, extent]
        spans = list(pairwise(borders))
        boxes = [box.narrow(dim, a, b) for box in boxes for a, b in spans]
    return boxes


@st.composite
def layouts(draw: st.DrawFn, weights: WeightMap, ranks: Sequence[int], *, mixed: bool = False) -> ListedLayout:
    """A layout in which every element is somewhere. With `mixed` a second copy may have another dtype."""
    layout = ListedLayout(weights, ranks)
    subsets = st.sets(st.sampled_from(list(ranks)), min_size=1, max_size=len(ranks)).map(sorted)
    for tensor in weights:
        for copy in range(draw(st.integers(1, 2))):
            known = layout.listed.get(tensor.name)
            wide = draw(st.booleans())
            dtype = "float32" if wide else "bfloat16"
            dtype = layout.shapes[known[0].piece.param].dtype if known and not mixed else dtype
            for number, box in enumerate(_cells(draw, tensor)):
                lead, pad = draw(st.integers(0, 1)), draw(st.integers(0, 2))
                at = draw(st.integers(0, pad))
                shape = (3,) * lead + (box.shape[0] + pad, *box.shape[1:])
                offset = (draw(st.integers(0, 2)),) * lead + (at,) + (0,) * (len(box.shape) - 1)
                param = Param(f"{tensor.name}.{copy}.{number}", shape, dtype)
                layout.add(tensor.name, box, param, offset, draw(subsets))
    return layout
