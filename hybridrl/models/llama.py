"""Llama 2 and 3 and what shares their architecture: grouped-query attention, SwiGLU, optional biases."""

from collections.abc import Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES, MLP_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role

NAMES: Mapping[Role, str] = {**ATTENTION_NAMES, **MLP_NAMES}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("llama",))
    bias = settings.flag("attention_bias", False)
    mlp_bias = settings.flag("mlp_bias", False)
    common = settings.common()
    settings.finish()
    return ModelSpec(**common, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
