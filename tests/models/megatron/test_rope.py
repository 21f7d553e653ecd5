"""Rotary frequencies against transformers' own."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrl.models.megatron.rope import amplitude, amplitude_fields, frequencies
from hybridrl.models.spec import MlaSpec
from tests.models.megatron.test_config import SPEC

SCALINGS = [
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0, "original_max_position_embeddings": 256},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama3_scaling_equals_transformers(scaling: dict[str, Any]) -> None:
    rope = {"rope_type": "llama3", **scaling}
    spec = dataclasses.replace(SPEC, head_dim=128, rope_theta=500000.0, rope_scaling=rope)
    config = LlamaConfig(head_dim=128, rope_parameters={**rope, "rope_theta": 500000.0}, max_position_embeddings=131072)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(frequencies(spec), expected, rtol=2e-6, atol=0)


def test_unscaled_frequencies_are_powers_of_the_base() -> None:
    found = frequencies(dataclasses.replace(SPEC, head_dim=4, rope_theta=10000.0))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.01]))


YARNS = [
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 2.0},
    {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
]


@pytest.mark.parametrize("scaling", YARNS)
def test_yarn_equals_transformers(scaling: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", **scaling}
    mla = MlaSpec(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=8)
    spec = dataclasses.replace(SPEC, mla=mla, rope_theta=10000.0, rope_scaling=rope)
    config = LlamaConfig(head_dim=64, rope_parameters={**rope, "rope_theta": 10000.0}, max_position_embeddings=163840)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert amplitude(spec) == pytest.approx(factor)
    torch.testing.assert_close(frequencies(spec), expected, rtol=2e-6, atol=0)


def test_a_part_of_a_head_is_rotated() -> None:
    found = frequencies(dataclasses.replace(SPEC, head_dim=8, partial_rotary_factor=0.5, rope_theta=10000.0))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.01]))
    assert amplitude(SPEC) == 1.0


def test_linear_scaling_equals_transformers() -> None:
    rope = {"rope_type": "linear", "factor": 3.0}
    spec = dataclasses.replace(SPEC, head_dim=64, rope_theta=10000.0, rope_scaling=rope)
    config = LlamaConfig(head_dim=64, rope_parameters={**rope, "rope_theta": 10000.0})
    expected, factor = ROPE_INIT_FUNCTIONS["linear"](config, torch.device("cpu"))
    assert amplitude(spec) == factor == 1.0
    torch.testing.assert_close(frequencies(spec), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("wanted", [0.8, 1.25, 1.1386294361119891])
def test_megatron_multiplies_cosines_and_sines_by_the_amplitude(wanted: float) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": wanted}
    spec = dataclasses.replace(SPEC, rope_scaling=rope)
    found = _yarn_get_concentration_factor_from_config(SimpleNamespace(**amplitude_fields(spec)))
    assert found == pytest.approx(wanted, rel=1e-15)
    assert amplitude_fields(SPEC) == {}
