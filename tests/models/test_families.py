"""Families: configurations are read strictly, and weight maps are exactly what transformers writes to files."""

import json
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig

from hybridrl.models.families import UnsupportedModelError, load_spec, spec_from_config, weight_map
from hybridrl.models.weights import Role
from tests.models.tiny import FAMILY_NAMES, VARIANTS, read_config, tiny_folder

OLD_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "torch_dtype": "bfloat16",
}
"""As transformers 4 wrote it."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_map_is_what_transformers_writes(variant: str) -> None:
    folder = tiny_folder(variant)
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    weights = weight_map(load_spec(folder))
    assert {t.name: t.shape for t in weights} == written
    assert len(weights) == len(written)


def test_weight_map_is_in_layer_order() -> None:
    weights = weight_map(load_spec(tiny_folder("qwen3_moe")))
    layers = [t.layer for t in weights]
    assert layers == [None, *sorted(x for x in layers if x is not None), None, None]
    assert [t.role for t in weights if t.layer is None] == [Role.EMBED, Role.FINAL_NORM, Role.LM_HEAD]
    assert [t.expert for t in weights.by_layer[0] if t.role is Role.EXPERT_UP] == list(range(8))


def test_tied_model_has_no_head() -> None:
    weights = weight_map(load_spec(tiny_folder("qwen3_tied")))
    assert weights.find(Role.LM_HEAD) is None
    assert weights.find(Role.EMBED) is not None


@pytest.mark.parametrize("variant", FAMILY_NAMES)
@pytest.mark.parametrize(
    "key", ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias"]
)
def test_absent_setting_takes_the_default_of_transformers(variant: str, key: str) -> None:
    config = {k: v for k, v in read_config(tiny_folder(variant, num_attention_heads=32)).items() if k != key}
    ours, theirs = spec_from_config(config), AutoConfig.for_model(**config)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


SIGMOID_KEYS = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "n_shared_experts")


@pytest.mark.parametrize("variant", ["deepseek_moe", "glm4_moe"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_parameters", "norm_topk_prob", *SIGMOID_KEYS])
def test_absent_setting_of_sigmoid_routing_takes_the_default_of_transformers(variant: str, key: str) -> None:
    folder = tiny_folder(variant, n_routed_experts=16)
    config = {k: v for k, v in read_config(folder).items() if k not in (key, "n_group" if key == "topk_group" else "")}
    ours, theirs = spec_from_config(config), AutoConfig.for_model(**config)
    assert ours.moe is not None
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.partial_rotary_factor == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert (ours.moe.num_groups, ours.moe.topk_groups) == (theirs.n_group, theirs.topk_group)
    assert ours.moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert ours.moe.num_shared_experts == theirs.n_shared_experts
    assert ours.moe.norm_topk_prob == theirs.norm_topk_prob
    assert ours.moe.layers.count(False) == theirs.first_k_dense_replace


def test_three_digit_experts_keep_their_names() -> None:
    spec = load_spec(tiny_folder("qwen3_moe"))
    assert spec.moe is not None
    weights = weight_map(replace(spec, moe=replace(spec.moe, num_experts=128)))
    experts = [t for t in weights if t.expert is not None]
    assert len(experts) == 4 * 128 * 3
    assert "model.layers.3.mlp.experts.100.gate_proj.weight" in weights
    assert sum(t.nbytes for t in experts) == 4 * 128 * 3 * 24 * 32 * 4


def test_weight_map_of_fifty_thousand_tensors_is_quick() -> None:
    spec = load_spec(tiny_folder("qwen3_moe"))
    assert spec.moe is not None
    big = replace(spec, num_layers=64, moe=replace(spec.moe, num_experts=256, layers=(True,) * 64))
    start = process_time()
    assert len(weight_map(big)) > 49_000
    assert process_time() - start < 5


def test_sizes_and_switches_are_read() -> None:
    spec = load_spec(tiny_folder("qwen3_moe_mixed"))
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 32, 8, 2, 8)
    assert spec.qk_norm
    assert not spec.qkv_bias
    assert spec.moe is not None
    assert spec.moe.layers == (True, False, True, True)
    assert not spec.moe.norm_topk_prob
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.ffn_size) == (8, 2, 24)
    assert spec.dtype == "float32"


def test_mixtral_normalises_its_top_k_weights() -> None:
    moe = load_spec(tiny_folder("mixtral")).moe
    assert moe is not None
    assert moe.norm_topk_prob


def test_sparse_step_places_the_experts() -> None:
    config = {**read_config(tiny_folder("qwen3_moe")), "decoder_sparse_step": 2}
    moe = spec_from_config(config).moe
    assert moe is not None
    assert moe.layers == (False, True, False, True)


def test_moe_family_without_experts_is_dense() -> None:
    config = {**read_config(tiny_folder("qwen3_moe")), "num_local_experts": 0}
    assert spec_from_config(config).moe is None


def test_old_configuration_is_read() -> None:
    spec = spec_from_config(OLD_LLAMA)
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == OLD_LLAMA["rope_scaling"]
    assert spec.dtype == "bfloat16"
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (4, 16, 1e-5)


def test_new_and_old_rope_settings_mean_the_same() -> None:
    old = {**OLD_LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {k: v for k, v in old.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    assert spec_from_config(old) == spec_from_config(new)
    plain = {**new, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert spec_from_config(plain).rope_scaling is None


def test_unsupported_architecture_says_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*llama.*qwen3_moe"):
        spec_from_config({"model_type": "gpt2"})


def test_every_unsupported_setting_is_told_at_once() -> None:
    config = {
        **OLD_LLAMA,
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
        "num_key_value_heads": 3,
        "rope_scaling": {"rope_type": "longrope"},
        "quantization_config": {"quant_method": "fp8"},
        "vocab_size": "50",
        "torch_dtype": "float64",
    }
    del config["intermediate_size"]
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(config)
    assert len(caught.value.problems) == 8
    for key in (
        "hidden_act='gelu'",
        "attention_dropout=0.1",
        "num_key_value_heads=3",
        "rope_type='longrope'",
        "quantization_config",
        "vocab_size='50'",
        "intermediate_size=None",
        "dtype='float64'",
    ):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("qwen2", {"use_sliding_window": True}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("mixtral", {"sliding_window": 64}),
        ("mixtral", {"num_experts_per_tok": 5}),
        ("qwen3_moe", {"num_experts_per_tok": 9}),
        ("qwen3_moe", {"norm_topk_prob": "yes"}),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"num_hidden_layers": True}),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(variant: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change)).split("_")[0]):
        spec_from_config({**read_config(tiny_folder(variant)), **change})


def test_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OLD_LLAMA))
    assert load_spec(tmp_path).family == "llama"
