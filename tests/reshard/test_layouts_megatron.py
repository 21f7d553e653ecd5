"""Megatron's layout: rows of fused projections, stages, experts, padding, ties; and that its two views agree."""

from collections.abc import Mapping
from dataclasses import replace
from time import process_time
from typing import Any

import pytest
import torch

from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.models.weights import Role, Tensor, WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout
from tests.reshard.simulated import BIASED, DENSE, MOE, SPECS, check_layout, scatter, whole_tensors

WORLDS: Mapping[str, dict[str, Any]] = {
    "one rank": {"world": 1},
    "dp2": {"world": 2},
    "tp2": {"world": 2, "tp": 2},
    "tp4 over two kv heads": {"world": 4, "tp": 4},
    "tp8 pp2": {"world": 16, "tp": 8, "pp": 2},
    "pp4": {"world": 4, "pp": 4},
    "pp2 vpp2": {"world": 2, "pp": 2, "vpp": 2},
    "uneven pp3 dp2": {"world": 6, "pp": 3, "first_stage_layers": 2},
    "uneven pp2": {"world": 2, "pp": 2, "last_stage_layers": 1},
    "cp2 tp2 pp2": {"world": 8, "cp": 2, "tp": 2, "pp": 2},
}
MOE_WORLDS: Mapping[str, dict[str, Any]] = {
    "ep2": {"world": 2, "ep": 2},
    "ep4 tp2": {"world": 4, "ep": 4, "tp": 2},
    "tp2 ep2 etp2": {"world": 4, "tp": 2, "ep": 2, "etp": 2},
    "tp4 ep2 etp1 dp2 pp2": {"world": 16, "tp": 4, "ep": 2, "pp": 2},
    "etp2 on tp1": {"world": 4, "etp": 2, "ep": 2},
    "tp2 etp4 vpp2": {"world": 16, "tp": 2, "etp": 4, "pp": 2, "vpp": 2},
}


def layout(spec: ModelSpec, world: int, **options: Any) -> MegatronLayout:
    sizes = {k: options.pop(k) for k in ("tp", "cp", "pp", "ep", "etp") if k in options}
    return MegatronLayout(weight_map(spec), ParallelSizes(world=world, **sizes), **{"vocab_multiple": 4, **options})


def rows_of(found: MegatronLayout, param: str) -> list[str]:
    """By rank, what each row of a parameter is: `q0 q1 k0`, rows in heads of one row."""
    told = []
    for rank in found.ranks:
        names = ["?"] * found.params(rank)[param].shape[0]
        for piece in found.pieces(rank):
            if piece.param == param:
                letter = piece.tensor.split("self_attn.")[1][0]
                for row in range(piece.box.shape[0]):
                    names[piece.offset[0] + row] = f"{letter}{piece.box.start[0] + row}"
        told.append(" ".join(names))
    return told


def heads(num_heads: int, num_kv_heads: int, head_dim: int = 1) -> ModelSpec:
    return replace(BIASED, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, ffn_size=8)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_qkv_is_interleaved_by_group_and_cut_by_rows(kind: str) -> None:
    param = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    assert rows_of(layout(heads(4, 2), 1), param) == ["q0 q1 k0 v0 q2 q3 k1 v1"]
    assert rows_of(layout(heads(4, 2), 2, tp=2), param) == ["q0 q1 k0 v0", "q2 q3 k1 v1"]
    assert rows_of(layout(heads(8, 2), 4, tp=4), param) == ["q0 q1 q2", "q3 k0 v0", "q4 q5 q6", "q7 k1 v1"]


def test_more_ranks_than_key_value_heads() -> None:
    found = layout(heads(64, 2, head_dim=4), 8, tp=8)
    holders = {name: set() for name in ("q_proj", "k_proj", "v_proj")}
    for rank in found.ranks:
        for piece in found.pieces(rank):
            name = piece.tensor.split(".")[-2]
            if name in holders:
                holders[name].add(rank)
    assert holders == {"q_proj": set(range(8)), "k_proj": {3, 7}, "v_proj": {3, 7}}
    query = [h for h in found.holders("model.layers.0.self_attn.q_proj.weight") if h.ranks == (0,)]
    assert [h.piece.box.shape[0] for h in query] == [34]  # eight heads of four rows, and half of another


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SPECS)
def test_views_agree_and_pieces_make_up_every_tensor(name: str, world: str) -> None:
    check_layout(layout(SPECS[name], **WORLDS[world]))


@pytest.mark.parametrize("engine", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("world", MOE_WORLDS)
@pytest.mark.parametrize("name", ["moe", "mixtral"])
def test_expert_worlds_agree_too(name: str, world: str, engine: bool) -> None:
    check_layout(layout(SPECS[name], **MOE_WORLDS[world], transformer_engine=engine))


def test_gate_and_up_are_halved_on_each_rank() -> None:
    found = layout(DENSE, 2, tp=2)
    tensors = whole_tensors(found.weights)
    ranks = scatter(found, tensors)
    gate, up = (tensors[f"model.layers.2.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    for rank in (0, 1):
        half = slice(12 * rank, 12 * rank + 12)
        expected = torch.cat([gate[half], up[half]])
        assert torch.equal(ranks[rank]["decoder.layers.2.mlp.linear_fc1.weight"], expected)


def test_output_and_down_projections_are_cut_by_columns() -> None:
    found = layout(DENSE, 4, tp=4)
    tensors = whole_tensors(found.weights)
    for rank, params in scatter(found, tensors).items():
        out = tensors["model.layers.0.self_attn.o_proj.weight"].chunk(4, dim=1)[rank]
        down = tensors["model.layers.0.mlp.down_proj.weight"].chunk(4, dim=1)[rank]
        assert torch.equal(params["decoder.layers.0.self_attention.linear_proj.weight"], out)
        assert torch.equal(params["decoder.layers.0.mlp.linear_fc2.weight"], down)


def test_expert_is_halved_over_expert_tensor_ranks() -> None:
    moe = MoeSpec(num_experts=4, top_k=2, ffn_size=8, norm_topk_prob=True, layers=(True,) * 4)
    found = layout(replace(MOE, moe=moe), 2, tp=2, etp=2)
    ranks = scatter(found, whole_tensors(found.weights))
    parts = [ranks[rank]["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"] for rank in (0, 1)]
    gate = torch.cat([part[:4] for part in parts])
    assert [tuple(part.shape) for part in parts] == [(8, 16)] * 2
    assert torch.equal(gate, whole_tensors(found.weights)["model.layers.0.mlp.experts.3.gate_proj.weight"])


def test_local_experts_are_global_ones() -> None:
    for options in ({"world": 4, "ep": 4}, {"world": 8, "ep": 4, "tp": 2}, {"world": 16, "ep": 4, "etp": 2, "pp": 2}):
        found = layout(MOE, **options)
        for rank in found.ranks:
            at = found.sizes.coordinates(rank)
            experts = {}
            for piece in found.pieces(rank):
                if "local_experts" in piece.param:
                    experts[int(piece.param.split("local_experts.")[1][0])] = found.weights[piece.tensor].expert
            assert experts == {0: 2 * at.ep, 1: 2 * at.ep + 1}


def test_padded_vocabulary() -> None:
    spec = replace(DENSE, vocab_size=10)
    found = layout(spec, 2, tp=2)
    assert found.padded_vocabulary == 16
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert [found.params(rank)[name].shape for rank in (0, 1)] == [(8, 16), (8, 16)]
    assert [h.piece.box.shape[0] for h in found.holders("lm_head.weight")] == [8, 2]
    ranks = scatter(found, whole_tensors(found.weights))
    assert (ranks[1]["output_layer.weight"][2:] == 0).all()
    assert (ranks[1]["output_layer.weight"][:2] != 0).all()


def test_rank_may_hold_nothing_but_padding() -> None:
    found = layout(replace(DENSE, vocab_size=10), 4, tp=4, vocab_multiple=8)
    assert found.params(3)["embedding.word_embeddings.weight"].shape == (8, 16)
    assert not [p for p in found.pieces(3) if p.param == "embedding.word_embeddings.weight"]
    check_layout(found)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_tied_embedding_lies_on_the_first_and_the_last_stage(pp: int) -> None:
    found = layout(SPECS["tied"], 2 * pp, pp=pp, tp=2)
    at = [(h.piece.param, h.ranks) for h in found.holders("model.embed_tokens.weight")]
    first = [("embedding.word_embeddings.weight", (0,)), ("embedding.word_embeddings.weight", (1,))]
    last = [("output_layer.weight", (2 * pp - 2,)), ("output_layer.weight", (2 * pp - 1,))]
    assert at == first + (last if pp > 1 else [])
    assert ("output_layer.weight" in found.params(2 * pp - 1)) == (pp > 1)
    assert "lm_head.weight" not in found.weights


def test_chunks_of_a_stage_have_prefixes_and_local_layers() -> None:
    found = layout(DENSE, 2, pp=2, vpp=2)
    names = list(found.params(1))
    assert names[0] == "chunk0.decoder.layers.0.input_layernorm.weight"
    assert names[-2:] == ["chunk1.decoder.final_layernorm.weight", "chunk1.output_layer.weight"]
    at = {p.param: found.weights[p.tensor].layer for p in found.pieces(1) if "input_layernorm" in p.param}
    assert at == {
        "chunk0.decoder.layers.0.input_layernorm.weight": 1,
        "chunk1.decoder.layers.0.input_layernorm.weight": 3,
    }


def test_transformer_engine_names() -> None:
    names = list(layout(MOE, 1, transformer_engine=True).params(0))
    layers = [name for name in names if ".layers." in name]
    assert layers[:8] == [
        f"decoder.layers.0.{name}"
        for name in (
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    ]
    assert [name for name in names if ".layers.1." in name][5:] == [
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        *(f"decoder.layers.1.mlp.experts.linear_fc1.weight{j}" for j in range(8)),
        *(f"decoder.layers.1.mlp.experts.linear_fc2.weight{j}" for j in range(8)),
    ]


def test_router_bias_is_kept_in_float32_whatever_the_parameters_are() -> None:
    moe = replace(SPECS["mixtral"].moe, correction_bias=True) if SPECS["mixtral"].moe else None
    spec = replace(SPECS["mixtral"], moe=moe, dtype="bfloat16", dtypes={Role.ROUTER_BIAS: "float32"})
    bias = [
        Tensor(f"model.layers.{i}.block_sparse_moe.bias", (4,), "float32", Role.ROUTER_BIAS, layer=i) for i in range(4)
    ]
    weights = WeightMap(spec, [*weight_map(replace(spec, moe=SPECS["mixtral"].moe)), *bias])
    for dtype in (None, "bfloat16", "float32"):
        params = MegatronLayout(weights, ParallelSizes(world=2, ep=2), dtype=dtype).params(1)
        assert params["decoder.layers.3.mlp.router.expert_bias"].dtype == "float32"
        assert params["decoder.layers.3.mlp.router.weight"].dtype == (dtype or "bfloat16")


def test_tensor_without_a_place_is_an_error_that_names_it() -> None:
    known = list(weight_map(DENSE))
    stranger = Tensor("model.layers.1.self_attn.q_a_proj.weight", (4, 16), "float32", Role.Q_A, layer=1)
    extra_layer = Tensor("model.layers.4.norm.weight", (16,), "float32", Role.INPUT_NORM, layer=4)
    misshapen = replace(known[-1], shape=(50, 15))
    weights = WeightMap(DENSE, [*known[:-1], stranger, extra_layer, misshapen])
    with pytest.raises(ValueError, match=r".") as caught:
        MegatronLayout(weights, ParallelSizes(world=1))
    for tensor in (stranger, extra_layer, misshapen):
        assert tensor.name in str(caught.value)


def test_every_size_that_does_not_fit_is_told_at_once() -> None:
    spec = replace(MOE, num_heads=6, num_kv_heads=3, ffn_size=30)
    with pytest.raises(ValueError, match=r".") as caught:
        layout(spec, 48, tp=4, ep=3, etp=16, pp=1, last_stage_layers=2)
    for words in ("num_attention_heads=6", "num_key_value_heads=3", "intermediate_size=30", "num_experts=8", "etp=16"):
        assert words in str(caught.value)
    assert "last_stage_layers=2" in str(caught.value)


def test_rank_off_the_world_is_an_error() -> None:
    found = layout(DENSE, 2)
    for ask in (found.params, found.pieces):
        with pytest.raises(KeyError, match="rank 2"):
            ask(2)
    with pytest.raises(KeyError):
        found.holders("model.layers.9.mlp.up_proj.weight")


def test_a_thousand_ranks_and_fifty_thousand_tensors_are_quick_to_ask() -> None:
    moe = MoeSpec(num_experts=256, top_k=8, ffn_size=2048, norm_topk_prob=True, layers=(True,) * 60)
    spec = replace(MOE, num_layers=60, hidden_size=7168, num_heads=128, num_kv_heads=8, head_dim=128, moe=moe)
    start = process_time()
    found = layout(spec, 1024, tp=8, pp=4, ep=32)
    assert len(found.weights) > 46_000
    assert len(found.pieces(777)) > 400
    assert found.holders("model.layers.59.mlp.experts.255.up_proj.weight")[0].ranks == tuple(range(799, 1024, 32))
    assert sum(len(found.holders(t.name)) for t in found.weights) > 46_000
    assert process_time() - start < 10
