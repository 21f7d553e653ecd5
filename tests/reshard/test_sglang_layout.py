"""SGLang's layout against numbers worked out by hand from the engine's rules."""

from collections.abc import Sequence

import numpy as np
import pytest

from hybridrl.models.vocabulary import padded_as_engine
from hybridrl.models.weights import Role, Tensor, WeightMap
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from tests.reshard import worlds
from tests.reshard.models import CONFIGS, weights

ATTENTION = "model.layers.0.self_attn."


def shards(layout: SGLangLayout) -> dict[int, worlds.Shard]:
    """Every rank's parameters, filled with whole tensors of element codes."""
    whole = worlds.code(layout.weights)
    return {rank: worlds.fill(layout, rank, whole) for rank in layout.ranks}


def tensor(layout: SGLangLayout, name: str) -> np.ndarray:
    return worlds.code(layout.weights)[name]


def engine(model: str, sizes: dict[str, int], **settings: object) -> SGLangLayout:
    return SGLangLayout(weights(model, **settings), RolloutSizes(**sizes))  # type: ignore[arg-type]


PLAIN: list[dict[str, int]] = [{"world": 1}, {"world": 4, "tp": 2}, {"world": 8, "tp": 8}]
OF_EXPERTS: list[dict[str, int]] = [{"world": 4, "tp": 2, "ep": 2}, {"world": 8, "tp": 8, "ep": 4}]
DATA_PARALLEL: list[dict[str, int]] = [
    {"world": 8, "tp": 8, "dp": 2, "ep": 8},
    {"world": 8, "tp": 4, "dp": 4, "moe_dp": 2, "dp_lm_head": True, "moe_dense_tp": 1},
]
DENSE = ("qwen3", "qwen2_tied", "llama")


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        *[(model, sizes) for model in CONFIGS for sizes in PLAIN],
        *[(model, sizes) for model in CONFIGS if model not in DENSE for sizes in OF_EXPERTS],
        *[(model, sizes) for model in CONFIGS if model not in (*DENSE, "mixtral") for sizes in DATA_PARALLEL],
    ],
)
def test_both_views_agree_and_every_tensor_is_somewhere_in_each_replica(model: str, sizes: dict[str, int]) -> None:
    layout = engine(model, sizes)
    by_rank = {rank: set(layout.pieces(rank)) for rank in layout.ranks}
    for one in layout.weights:
        holders = layout.holders(one.name)
        assert {(h.piece, rank) for h in holders for rank in h.ranks} == {
            (p, rank) for rank, pieces in by_rank.items() for p in pieces if p.tensor == one.name
        }
        assert len({h.piece for h in holders}) == len(holders)
        for replica in range(layout.sizes.world // layout.sizes.tp):
            ranks = set(range(replica * layout.sizes.tp, (replica + 1) * layout.sizes.tp))
            seen = np.zeros(one.shape, bool)
            for holder in holders:
                if ranks & set(holder.ranks):
                    box = holder.piece.box
                    seen[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
            assert seen.all(), one.name


@pytest.mark.parametrize("model", CONFIGS)
def test_tensors_that_claim_to_lie_alike_do(model: str) -> None:
    layout = engine(model, {"world": 4, "tp": 2, "ep": 1})
    kinds: dict[object, list[Tensor]] = {}
    for one in layout.weights:
        kinds.setdefault((layout.alike(one), one.shape), []).append(one)
    for members in kinds.values():
        views = {tuple((h.piece.box, len(h.piece.offset), h.ranks) for h in layout.holders(t.name)) for t in members}
        assert len(views) == 1


def test_query_heads_are_cut_and_key_heads_repeated_where_tp_exceeds_them() -> None:
    layout = engine("qwen3", {"world": 4, "tp": 4}, num_attention_heads=8, num_key_value_heads=2, head_dim=1)
    parts = shards(layout)
    q, k, v = (tensor(layout, f"{ATTENTION}{x}_proj.weight") for x in "qkv")
    for rank, (heads, kv) in enumerate([((0, 1), 0), ((2, 3), 0), ((4, 5), 1), ((6, 7), 1)]):
        rows = np.concatenate([q[list(heads)], k[[kv]], v[[kv]]])
        assert np.array_equal(parts[rank][ATTENTION + "qkv_proj.weight"], rows)


def test_biases_follow_the_rows_and_the_output_bias_is_whole() -> None:
    layout = engine("llama", {"world": 2, "tp": 2})
    parts = shards(layout)
    q, k, v = (tensor(layout, f"{ATTENTION}{x}_proj.bias") for x in "qkv")
    assert np.array_equal(parts[1][ATTENTION + "qkv_proj.bias"], np.concatenate([q[16:], k[4:], v[4:]]))
    assert np.array_equal(parts[0][ATTENTION + "o_proj.bias"], tensor(layout, ATTENTION + "o_proj.bias"))


def test_gate_and_up_are_halves_and_outputs_are_cut_by_columns() -> None:
    layout = engine("qwen3", {"world": 2, "tp": 2})
    parts, name = shards(layout), "model.layers.2.mlp."
    gate, up, down = (tensor(layout, f"{name}{x}_proj.weight") for x in ("gate", "up", "down"))
    assert np.array_equal(parts[1][name + "gate_up_proj.weight"], np.concatenate([gate[8:], up[8:]]))
    assert np.array_equal(parts[1][name + "down_proj.weight"], down[:, 8:])
    assert np.array_equal(parts[0][ATTENTION + "o_proj.weight"], tensor(layout, ATTENTION + "o_proj.weight")[:, :16])


@pytest.mark.parametrize(
    ("sizes", "shape", "experts", "rows"),
    [
        ({"tp": 4, "ep": 4}, (2, 16, 16), {0: [0, 1], 3: [6, 7]}, {0: 0, 3: 0}),
        ({"tp": 4}, (8, 4, 16), {0: list(range(8)), 3: list(range(8))}, {0: 0, 3: 6}),
        ({"tp": 4, "ep": 2}, (4, 8, 16), {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}, {0: 0, 1: 4, 2: 0}),
        ({"tp": 4, "ep": 2, "moe_dp": 2}, (4, 16, 16), {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [0, 1, 2, 3]}, {2: 0}),
    ],
)  # fmt: skip
def test_experts_are_stacked_and_cut_by_both_sizes(
    sizes: dict[str, int], shape: tuple[int, ...], experts: dict[int, list[int]], rows: dict[int, int]
) -> None:
    layout = engine("qwen3_moe", {"world": 4, **sizes})
    parts, name = shards(layout), "model.layers.1.mlp.experts."
    height = shape[1] // 2
    for rank, held in experts.items():
        w13, w2 = parts[rank][name + "w13_weight"], parts[rank][name + "w2_weight"]
        assert w13.shape == shape
        at = slice(rows.get(rank, 0), rows.get(rank, 0) + height)
        for local, expert in enumerate(held):
            gate, up, down = (tensor(layout, f"{name}{expert}.{x}_proj.weight") for x in ("gate", "up", "down"))
            assert np.array_equal(w13[local], np.concatenate([gate[at], up[at]]))
            assert np.array_equal(w2[local], down[:, at])


def test_mixtral_keeps_its_module_and_feeds_gate_from_w1_and_up_from_w3() -> None:
    layout = engine("mixtral", {"world": 2, "tp": 2, "ep": 2})
    parts, name = shards(layout), "model.layers.0.block_sparse_moe."
    w1, w3, w2 = (tensor(layout, f"{name}experts.5.{x}.weight") for x in ("w1", "w3", "w2"))
    assert np.array_equal(parts[1][name + "experts.w13_weight"][1], np.concatenate([w1, w3]))
    assert np.array_equal(parts[1][name + "experts.w2_weight"][1], w2)
    assert name + "gate.weight" in parts[0]


def test_data_parallel_attention_is_cut_over_fewer_ranks_and_the_rest_stays() -> None:
    layout = engine("qwen3_moe", {"world": 4, "tp": 4, "dp": 2, "ep": 4})
    plain = engine("qwen3_moe", {"world": 4, "tp": 4, "ep": 4})
    parts, whole = shards(layout), shards(plain)
    for name in ("qkv_proj.weight", "o_proj.weight"):
        assert np.array_equal(parts[0][ATTENTION + name], parts[2][ATTENTION + name])
        assert not np.array_equal(parts[0][ATTENTION + name], parts[1][ATTENTION + name])
    assert parts[0]["model.embed_tokens.weight"].shape == (96, 16)
    assert parts[0]["lm_head.weight"].shape == (48, 16)
    for rank in range(4):
        for name in ("model.layers.1.mlp.experts.w13_weight", "lm_head.weight"):
            assert np.array_equal(parts[rank][name], whole[rank][name])
    sizes = RolloutSizes(world=4, tp=4, dp=2, ep=4, dp_lm_head=True)
    assert SGLangLayout(weights("qwen3_moe"), sizes).params(0)["lm_head.weight"].shape == (96, 16)


@pytest.mark.parametrize(
    ("vocabulary", "over", "padded"),
    [(150, 1, 192), (150, 2, 192), (150, 4, 192), (150, 5, 320), (151936, 8, 151936), (1000, 16, 1024), (130, 64, 192)],
)
def test_the_vocabulary_is_padded_to_64_or_to_64_a_rank(vocabulary: int, over: int, padded: int) -> None:
    assert padded_as_engine(vocabulary, over) == padded


def test_a_rank_may_hold_padding_alone() -> None:
    layout = engine("qwen3", {"world": 8, "tp": 8}, vocab_size=70)
    assert layout.params(7)["lm_head.weight"].shape == (16, 16)
    assert [h.ranks for h in layout.holders("lm_head.weight")] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(("model", "own"), [("qwen3_moe_tied", True), ("qwen2_tied", False)])
def test_a_tied_head_is_the_embedding_or_a_parameter_of_its_own(model: str, own: bool) -> None:
    layout = engine(model, {"world": 2, "tp": 2})
    assert ("lm_head.weight" in layout.params(0)) is own
    params = {h.piece.param for h in layout.holders("model.embed_tokens.weight")}
    assert params == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if own else set())


def test_latent_attention_fuses_what_goes_down_and_cuts_what_goes_up() -> None:
    layout = engine("deepseek_v3", {"world": 2, "tp": 2, "ep": 2})
    parts = shards(layout)
    q_a, kv_a = tensor(layout, ATTENTION + "q_a_proj.weight"), tensor(layout, ATTENTION + "kv_a_proj_with_mqa.weight")
    for rank in (0, 1):
        fused = parts[rank][ATTENTION + "fused_qkv_a_proj_with_mqa.weight"]
        assert np.array_equal(fused, np.concatenate([q_a, kv_a]))
    for name, rows in (("q_b_proj.weight", 32), ("kv_b_proj.weight", 32)):
        assert np.array_equal(parts[1][ATTENTION + name], tensor(layout, ATTENTION + name)[rows:])
    assert parts[0][ATTENTION + "o_proj.weight"].shape == (16, 16)
    plain = engine("deepseek_v3_whole_q", {"world": 2, "tp": 2}).params(0)
    assert plain[ATTENTION + "q_proj.weight"].shape == (32, 16)
    assert plain[ATTENTION + "kv_a_proj_with_mqa.weight"].shape == (12, 16)


def test_dense_layers_and_shared_experts_follow_the_engines_switches() -> None:
    dense, shared = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    assert engine("deepseek_v3", {"world": 4, "tp": 4}).params(0)[dense].shape == (8, 16)
    sizes = RolloutSizes(world=4, tp=4, dp=4, moe_dense_tp=1, whole_shared_experts=True)
    params = SGLangLayout(weights("deepseek_v3"), sizes).params(0)
    assert (params[dense].shape, params[shared].shape) == ((32, 16), (16, 16))
    assert engine("deepseek_v3", {"world": 4, "tp": 4}).params(0)[shared].shape == (4, 16)


def test_a_fused_shared_expert_follows_the_local_routed_ones_on_every_rank() -> None:
    tensors = weights("glm4_moe")
    layout = SGLangLayout(tensors, RolloutSizes(world=2, tp=2, ep=2), fused_shared=1)
    parts, name = shards(layout), "model.layers.1.mlp."
    gate, up = (tensor(layout, f"{name}shared_experts.{x}_proj.weight") for x in ("gate", "up"))
    for rank in (0, 1):
        stack = parts[rank][name + "experts.w13_weight"]
        assert stack.shape[0] == 5
        assert np.array_equal(stack[4], np.concatenate([gate, up]))
    assert not any("shared_experts" in param for param in layout.params(0))
    with pytest.raises(ValueError, match="num_fused_shared_experts=1: can be 0, or 1 of 1, not of 2"):
        SGLangLayout(weights("glm4_moe", n_shared_experts=2), RolloutSizes(world=1), fused_shared=1)


def test_dtype_is_the_parameters_own() -> None:
    layout = SGLangLayout(weights("glm4_moe"), RolloutSizes(world=1), dtype="float16")
    params = layout.params(0)
    assert params["model.layers.1.mlp.gate.weight"].dtype == "float32"
    assert params["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "float32"
    assert params["model.norm.weight"].dtype == "float16"
    deepseek = SGLangLayout(weights("deepseek_v3"), RolloutSizes(world=1)).params(0)
    assert deepseek["model.layers.1.mlp.gate.weight"].dtype == "bfloat16"
    assert deepseek["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "float32"


def test_the_draft_model_holds_the_prediction_layer_and_shares_embedding_and_head() -> None:
    tensors = weights("deepseek_v3", num_nextn_predict_layers=1)
    layout = SGLangLayout(tensors, RolloutSizes(world=2, tp=2, ep=2), mtp=True)
    params = layout.params(0)
    assert params["draft.model.eh_proj.weight"].shape == (16, 32)
    assert params["draft.model.decoder.mlp.experts.w13_weight"].shape == (4, 16, 16)
    assert layout.omitted == {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    assert {h.piece.param for h in layout.holders("model.layers.4.enorm.weight")} == {"draft.model.enorm.weight"}
    assert not any(name.startswith("draft.") for name in SGLangLayout(tensors, RolloutSizes(world=1)).params(0))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (
            "mixtral",
            {"world": 4, "tp": 4, "dp": 2},
            "rollout.dp=2: the engine's mixtral has no data-parallel attention",
        ),
        ("qwen3", {"world": 3, "tp": 3}, "num_attention_heads=8 is not a multiple of tp/dp=3"),
        ("qwen3", {"world": 2, "tp": 2, "ep": 2}, "rollout.ep=2 for a model without experts"),
        ("qwen3_moe", {"world": 16, "tp": 16, "dp": 4, "ep": 16}, "num_experts=8 is not a multiple of rollout.ep=16"),
        ("qwen3_moe", {"world": 16, "tp": 16, "dp": 4}, "intermediate size 8 is not a multiple of tp/ep/moe_dp=16"),
    ],
)
def test_sizes_that_the_engine_cannot_hold_are_refused(model: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        engine(model, sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 6, "tp": 4}, "world=6 is no multiple of rollout.tp=4"),
        ({"world": 4, "tp": 4, "dp": 3}, "rollout.tp=4 is no multiple of rollout.dp=3"),
        ({"world": 4, "tp": 4, "ep": 4, "moe_dp": 2}, "rollout.ep=4 · rollout.moe_dp=2"),
        ({"world": 4, "tp": 4, "moe_dense_tp": 2}, "the engine knows None, 1 and tp=4"),
        ({"world": 4, "tp": 0}, "rollout.tp=0 must be at least 1"),
    ],
)
def test_sizes_that_make_no_engine_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSizes(**sizes)  # type: ignore[arg-type]


def test_dense_layers_among_experts_are_refused_where_the_engine_builds_experts_everywhere() -> None:
    with pytest.raises(ValueError, match=r"layers \[1\] have no experts"):
        engine("qwen3_moe", {"world": 1}, mlp_only_layers=[1])


def test_a_tensor_of_an_unknown_role_or_shape_does_not_vanish() -> None:
    tensors = weights("qwen3")
    extra = Tensor("model.layers.0.indexer.weight", (2,), "bfloat16", Role.KV_B, 0)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.indexer\.weight \(kv_b\) has no place"):
        SGLangLayout(WeightMap(tensors.spec, [*tensors, extra]), RolloutSizes(world=1))
    wrong: Sequence[Tensor] = [
        Tensor(t.name, (t.shape[0] + 1, *t.shape[1:]), t.dtype, t.role, t.layer) if t.role is Role.Q else t
        for t in tensors
    ]
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \[33, 16\], .*qkv_proj\.weight takes \[32, 16\]"):
        SGLangLayout(WeightMap(tensors.spec, wrong), RolloutSizes(world=1))


def test_ranks_may_be_any_and_others_are_none_of_it() -> None:
    layout = SGLangLayout(weights("qwen3"), RolloutSizes(world=2, tp=2), ranks=(7, 3))
    assert layout.ranks == (3, 7)
    assert [h.ranks for h in layout.holders(ATTENTION + "o_proj.weight")] == [(7,), (3,)]
    with pytest.raises(KeyError, match="rank 0 is not among the 2 ranks"):
        layout.params(0)
    with pytest.raises(ValueError, match="ranks are 1 different ones in 2 slots of 2"):
        SGLangLayout(weights("qwen3"), RolloutSizes(world=2), ranks=(1, 1))
