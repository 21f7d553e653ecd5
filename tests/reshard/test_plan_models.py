"""The models that plans are made for, against their published sizes; their layouts against each other."""

from dataclasses import replace

import pytest

from hybridrl.models.families import UnsupportedModelError, spec_from_config, weight_map
from hybridrl.models.spec import MlaSpec
from hybridrl.models.weights import Role
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.explain import find_model
from hybridrl.reshard.layouts.megatron import MegatronLayout
from tests.reshard.models import CONFIGS, weights


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("qwen3_30b_a3b", 18867, 30_532_122_624),
        ("qwen3_235b_a22b", 36945, 235_093_634_560),
        ("deepseek_v3", 45395, 671_026_419_200),
        ("glm4_5_355b", 44189, 352_797_829_024),
        ("mixtral_8x7b", 995, 46_702_792_704),
        ("qwen3_8b", 399, 8_190_735_360),
        ("moonlight_16b", 5317, 15_960_110_208),
    ],
)
def test_shipped_models_have_their_published_size(name: str, tensors: int, parameters: int) -> None:
    tensor_map = weight_map(replace(find_model(name), mtp_layers=0))
    assert (len(tensor_map), sum(t.size for t in tensor_map)) == (tensors, parameters)


def test_deepseek_v3_is_read_from_its_configuration() -> None:
    spec = find_model("deepseek_v3")
    assert spec.mla == MlaSpec(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert spec.moe is not None
    assert (spec.moe.layers[:4], sum(spec.moe.layers)) == ((False, False, False, True), 58)
    assert (spec.moe.score_function, spec.moe.correction_bias, spec.moe.shared_ffn_size) == ("sigmoid", True, 2048)
    assert (spec.mtp_layers, spec.dtypes) == (1, {Role.ROUTER_BIAS: "float32"})


def test_prediction_layers_follow_the_main_ones_or_are_left_out() -> None:
    spec = find_model("glm4_5_355b")
    tensors, main = weight_map(spec), weight_map(replace(spec, mtp_layers=0))
    names = [t.name for t in tensors][len(main) :]
    assert [t.name for t in main] == [t.name for t in tensors][: len(main)]
    assert all(name.startswith("model.layers.92.") for name in names)
    assert names[:4] == [f"model.layers.92.{n}.weight" for n in ("embed_tokens", "enorm", "hnorm", "eh_proj")]
    assert {"model.layers.92.mlp.experts.159.down_proj.weight", "model.layers.92.shared_head.head.weight"} <= set(names)
    assert tensors["model.layers.92.mlp.gate.e_score_correction_bias"].dtype == "float32"


def test_names_are_those_of_the_checkpoint() -> None:
    names = {t.name for t in weights("deepseek_v3")}
    for name in (
        "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.gate_proj.weight",
    ):
        assert name in names
    whole = {t.name for t in weights("deepseek_v3_whole_q")}
    assert not any("q_a" in name or "q_b" in name for name in whole)
    assert "model.layers.0.self_attn.q_proj.weight" in whole


@pytest.mark.parametrize(
    ("model", "setting", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "kv_lora_rank", None),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("glm4_moe", "n_group", 3),
        ("glm4_moe", "num_experts_per_tok", 9),
        ("glm4_moe", "moe_layer_freq", 2),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(model: str, setting: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=setting):
        spec_from_config({**CONFIGS[model], setting: value})


@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v3_whole_q", "glm4_moe"])
def test_every_element_of_training_parameters_is_some_tensors(model: str, transformer_engine: bool) -> None:
    tensors = weights(model)
    sizes = ParallelSizes(world=8, tp=4, pp=2, ep=2, etp=2)
    layout = MegatronLayout(tensors, sizes, vocab_multiple=1, transformer_engine=transformer_engine)
    held: dict[str, int] = {}
    for rank in layout.ranks:
        sizes_by_param = {name: param.size for name, param in layout.params(rank).items()}
        for piece in layout.pieces(rank):
            sizes_by_param[piece.param] -= piece.box.size
        padding = {name: left for name, left in sizes_by_param.items() if left}
        assert set(padding) <= {"embedding.word_embeddings.weight", "output_layer.weight"}
    for tensor in tensors:
        for holder in layout.holders(tensor.name):
            held[tensor.name] = held.get(tensor.name, 0) + holder.piece.box.size
        assert held[tensor.name] == tensor.size


def test_projections_down_are_whole_in_one_spec_and_cut_in_the_other() -> None:
    tensors, name = weights("deepseek_v3"), "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    sizes = ParallelSizes(world=4, tp=4)
    local, fused = (MegatronLayout(tensors, sizes, transformer_engine=te).params(0) for te in (False, True))
    assert (local[name].shape, fused[name].shape) == ((3, 16), (12, 16))
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in local
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in fused
    assert "decoder.layers.1.mlp.shared_experts.linear_fc1.weight" in fused
