"""The training layout in the engine's order: rows of fused projections, stacks, padding, and aliases of everything."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.proof import coverage_problems
from tests.reshard.simulated import MOE, SPECS, check_layout, scatter, whole_tensors
from tests.reshard.test_layouts_megatron import MOE_WORLDS, WORLDS, heads, rows_of

ALL_MOE = replace(MOE, moe=replace(MOE.moe, layers=(True,) * 4)) if MOE.moe else MOE
SERVED = {
    "qwen3": SPECS["dense"],
    "qwen3 tied": SPECS["tied"],
    "qwen3_moe": ALL_MOE,
    "qwen3_moe tied": replace(ALL_MOE, tied=True),
    "mixtral": SPECS["mixtral"],
    "biased": replace(SPECS["biased"], mlp_bias=False),
}
EQUAL: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "one rank": ({"world": 1}, {"world": 1}),
    "two replicas": ({"world": 2}, {"world": 2, "tp": 1}),
    "tp2": ({"world": 2, "tp": 2, "etp": 2}, {"world": 2, "tp": 2}),
    "tp2, two replicas": ({"world": 4, "tp": 2, "etp": 2}, {"world": 4, "tp": 2}),
    "tp4 over two kv heads": ({"world": 4, "tp": 4, "etp": 4}, {"world": 4, "tp": 4}),
    "tp2 ep2": ({"world": 2, "tp": 2, "ep": 2}, {"world": 2, "tp": 2, "ep": 2}),
    "tp4 ep2": ({"world": 4, "tp": 4, "ep": 2, "etp": 2}, {"world": 4, "tp": 4, "ep": 2}),
    "tp4 ep4": ({"world": 4, "tp": 4, "ep": 4}, {"world": 4, "tp": 4, "ep": 4}),
}


def layout(spec: ModelSpec | WeightMap, **options: Any) -> MegatronLayout:
    weights = spec if isinstance(spec, WeightMap) else weight_map(spec)
    sizes = {k: options.pop(k) for k in ("world", "tp", "cp", "pp", "ep", "etp") if k in options}
    return MegatronLayout(weights, ParallelSizes(**sizes), engine_order=True, **options)


def planner(spec: ModelSpec, train: dict[str, int], rollout: dict[str, int], **options: Any) -> Planner:
    source = layout(spec, **{**train, "etp": train.get("etp", 1) if spec.moe else 1})
    return Planner(source, SGLangLayout(source.weights, RolloutSizes(**rollout)), **options)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_qkv_is_queries_keys_values_on_each_rank(kind: str) -> None:
    param = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    assert rows_of(layout(heads(4, 2), world=1), param) == ["q0 q1 q2 q3 k0 k1 v0 v1"]
    assert rows_of(layout(heads(4, 2), world=2, tp=2), param) == ["q0 q1 k0 v0", "q2 q3 k1 v1"]
    replicated = ["q0 q1 k0 v0", "q2 q3 k0 v0", "q4 q5 k1 v1", "q6 q7 k1 v1"]
    assert rows_of(layout(heads(8, 2), world=4, tp=4), param) == replicated


def test_replicated_heads_have_one_holder_with_all_their_ranks() -> None:
    found = layout(heads(8, 2), world=8, tp=4)
    told = {h.piece.box.start[0]: h.ranks for h in found.holders("model.layers.0.self_attn.k_proj.weight")}
    assert told == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SPECS)
def test_views_agree_and_pieces_make_up_every_tensor(name: str, world: str) -> None:
    check_layout(layout(SPECS[name], **WORLDS[world]))


@pytest.mark.parametrize("engine", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("world", MOE_WORLDS)
@pytest.mark.parametrize("name", ["moe", "mixtral"])
def test_expert_worlds_agree_too(name: str, world: str, engine: bool) -> None:
    check_layout(layout(SPECS[name], **MOE_WORLDS[world], transformer_engine=engine))


def test_experts_are_stacked_with_gate_rows_before_up_rows() -> None:
    found = layout(MOE, world=4, tp=2, ep=2, etp=2)
    tensors = whole_tensors(found.weights)
    ranks = scatter(found, tensors)
    for rank, params in ranks.items():
        at = found.sizes.coordinates(rank)
        w13, w2 = (params[f"decoder.layers.2.mlp.experts.{n}"] for n in ("w13", "w2"))
        assert (tuple(w13.shape), tuple(w2.shape)) == ((4, 8, 16), (4, 16, 4))
        for local in range(4):
            prefix = f"model.layers.2.mlp.experts.{4 * at.ep + local}."
            gate, up = (tensors[prefix + n].chunk(2)[at.etp] for n in ("gate_proj.weight", "up_proj.weight"))
            assert torch.equal(w13[local], torch.cat([gate, up]))
            assert torch.equal(w2[local], tensors[prefix + "down_proj.weight"].chunk(2, dim=1)[at.etp])


@pytest.mark.parametrize(("vocabulary", "tp", "rows"), [(50, 1, 64), (50, 2, 64), (64, 4, 64), (200, 8, 256)])
def test_vocabulary_is_padded_by_the_engines_rule(vocabulary: int, tp: int, rows: int) -> None:
    spec = replace(heads(8, 8), vocab_size=vocabulary)
    assert layout(spec, world=tp, tp=tp).padded_vocabulary == rows
    odd = layout(replace(heads(6, 6), vocab_size=50, ffn_size=6), world=3, tp=3)
    assert odd.padded_vocabulary == 192


@pytest.mark.parametrize("world", EQUAL)
@pytest.mark.parametrize("name", SERVED)
def test_with_equal_sizes_every_parameter_is_the_engines(name: str, world: str) -> None:
    train, rollout = EQUAL[world]
    spec = SERVED[name]
    if spec.moe is None and rollout.get("ep", 1) > 1:
        train, rollout = {k: v for k, v in train.items() if k != "ep"}, {**rollout, "ep": 1}
    found = planner(spec, train, rollout)
    for rank in found.destination.ranks:
        plan = found.plan(rank)
        params = found.destination.params(rank)
        assert {alias.destination for alias in plan.aliases} == set(params)
        assert plan.aliased_bytes == found.destination_bytes(rank)
        assert (plan.copies, plan.fills, plan.rounds, plan.echoes) == ((), (), (), ())
        assert coverage_problems(plan, params) == []
        for alias in plan.aliases:
            assert found.source.params(rank)[alias.source].shape == params[alias.destination].shape


def test_padding_is_shared_only_where_the_source_promises_that_it_is_zero() -> None:
    found = planner(SPECS["dense"], {"world": 1}, {"world": 1})
    (embedding,) = (a for a in found.plan(0).aliases if "embed" in a.destination)
    assert (embedding.nbytes, embedding.padding_bytes) == (64 * 16 * 4, 14 * 16 * 4)
    found.source.zero_padding = False  # type: ignore[attr-defined]
    plan = found.plan(0)
    assert {v.param for v in plan.fills} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any("embed" in a.destination for a in plan.aliases)


def test_megatrons_order_shares_little_and_other_sizes_share_what_lies_alike() -> None:
    megatron = MegatronLayout(weight_map(ALL_MOE), ParallelSizes(world=2, ep=2))
    engine = SGLangLayout(megatron.weights, RolloutSizes(world=2, tp=2, ep=2))
    shared = {a.destination.split(".")[-2] for a in Planner(megatron, engine).plan(0).aliases}
    assert not shared & {"experts", "qkv_proj"}
    ours = Planner(layout(megatron.weights, world=2, ep=2), engine).plan(0)
    names = {a.destination for a in ours.aliases}
    assert "model.layers.0.mlp.experts.w13_weight" in names  # cut over EP on both sides
    assert "model.layers.0.self_attn.qkv_proj.weight" not in names  # whole here, halved there
