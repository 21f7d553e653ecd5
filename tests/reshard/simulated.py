"""A world of many ranks in one process: every rank's parameters as tensors, filled and read through a layout."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.models.weights import Piece, WeightMap
from hybridrl.reshard.golden import box_slices, write_piece, zero_padding
from hybridrl.reshard.layout import Layout

Ranks = Mapping[int, Mapping[str, torch.Tensor]]

DENSE = ModelSpec(
    family="qwen3",
    num_layers=4,
    hidden_size=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    vocab_size=50,
    tied=False,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    qk_norm=True,
    dtype="float32",
)
BIASED = replace(DENSE, family="llama", qk_norm=False, qkv_bias=True, output_bias=True, mlp_bias=True)
MOE = replace(
    DENSE,
    family="qwen3_moe",
    moe=MoeSpec(num_experts=8, top_k=2, ffn_size=8, norm_topk_prob=True, layers=(False, True, True, True)),
)
MIXTRAL = replace(
    DENSE, family="mixtral", qk_norm=False, moe=replace(MOE.moe, num_experts=4, layers=(True,) * 4) if MOE.moe else None
)
SPECS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "biased": BIASED,
    "moe": MOE,
    "tied moe": replace(MOE, tied=True),
    "mixtral": MIXTRAL,
}


def whole_tensors(weights: WeightMap) -> dict[str, torch.Tensor]:
    """Tensors of which every element is another number."""
    found, start = {}, 1
    for tensor in weights:
        found[tensor.name] = torch.arange(start, start + tensor.size, dtype=torch.float32).view(tensor.shape)
        start += tensor.size
    assert start < 2**24  # beyond, float32 skips whole numbers
    return found


def scatter(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Ranks:
    """What every rank should hold, padding 0."""
    return {rank: scatter_rank(layout, tensors, rank) for rank in layout.ranks}


def scatter_rank(layout: Layout, tensors: Mapping[str, torch.Tensor], rank: int) -> Mapping[str, torch.Tensor]:
    """What one rank should hold; nothing where it takes no part."""
    if rank not in layout.ranks:
        return {}
    params = {name: torch.full(p.shape, float("nan")) for name, p in layout.params(rank).items()}
    pieces = layout.pieces(rank)
    zero_padding(pieces, params)
    for piece in pieces:
        write_piece(params, piece, tensors[piece.tensor][box_slices(piece.box)])
    return params


def check_layout(layout: Layout) -> None:
    """The two views of a layout agree; its pieces make up each tensor and lie apart in their parameters."""
    held: dict[Piece, list[int]] = {}
    for rank in layout.ranks:
        params, used = layout.params(rank), {}
        order = {t.name: i for i, t in enumerate(layout.weights)}
        pieces = layout.pieces(rank)
        assert [order[p.tensor] for p in pieces] == sorted(order[p.tensor] for p in pieces)
        for piece in pieces:
            assert layout.weights[piece.tensor].box.contains(piece.box)
            assert piece.box.size > 0
            assert len(piece.offset) == len(params[piece.param].shape)
            if piece.param not in used:
                used[piece.param] = torch.zeros(params[piece.param].shape)
            view = used[piece.param][piece.slices]
            assert view.shape == piece.extent
            view += 1
            held.setdefault(piece, []).append(rank)
        assert all(count.max() == 1 for count in used.values())
    told = {h.piece: list(h.ranks) for t in layout.weights for h in layout.holders(t.name)}
    assert told == held
    for tensor in layout.weights:
        count = torch.zeros(tensor.shape)
        for box in {piece.box for piece in held if piece.tensor == tensor.name}:
            count[box_slices(box)] += 1
        assert (count == 1).all(), tensor.name
