"""Rotary frequencies. Megatron's own Llama 3 scaling knows one of its four parameters only."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.models.spec import ModelSpec


def frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position for each pair of a head's dimensions, fp32 `[head_dim / 2]` (Su et al. 2021, section 3.2.2).

    With Llama 3's scaling, wavelengths above `original / low_freq_factor` positions are stretched by `factor`, those
    below `original / high_freq_factor` stay, and those between are interpolated.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    plain = 1.0 / spec.rope_theta**exponents
    return plain if spec.rope_scaling is None else _llama3(plain, spec.rope_scaling)


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share_kept = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share_kept + (1.0 - share_kept) / scaling["factor"])
