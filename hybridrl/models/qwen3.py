"""Qwen3, dense: as Llama, with an RMS norm over each query and key head and a head size of its own."""

from collections.abc import Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES, MLP_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role

NAMES: Mapping[Role, str] = {**ATTENTION_NAMES, **MLP_NAMES}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("qwen3",))
    settings.only("use_sliding_window", False, default=False)
    bias = settings.flag("attention_bias", False)
    common = settings.common(default_head_dim=128, default_kv_heads=32)
    settings.finish()
    return ModelSpec(**common, qkv_bias=bias, output_bias=bias, qk_norm=True)
