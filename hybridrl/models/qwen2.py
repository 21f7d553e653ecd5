"""Qwen2 and Qwen2.5, dense: as Llama, with biases on the query, key and value projections."""

from collections.abc import Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES, MLP_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role

NAMES: Mapping[Role, str] = {**ATTENTION_NAMES, **MLP_NAMES}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("qwen2",))
    settings.only("use_sliding_window", False, default=False)
    common = settings.common(default_kv_heads=32)
    settings.finish()
    return ModelSpec(**common, qkv_bias=True)
