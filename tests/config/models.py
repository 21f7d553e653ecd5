"""Sizes of models, as the checks see them."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Moe:
    num_experts: int = 8
    ffn_size: int = 96
    shared_ffn_size: int = 0
    correction_bias: bool = False
    layers: tuple[bool, ...] = (True,) * 6


@dataclass(frozen=True)
class Sizes:
    family: str = "qwen3"
    num_layers: int = 6
    hidden_size: int = 96
    num_heads: int = 12
    head_dim: int = 8
    num_kv_heads: int = 4
    ffn_size: int = 96
    max_positions: int = 4096
    mlp_bias: bool = False
    output_bias: bool = False
    moe: Moe | None = None
    mla: Any = None
    rope_scaling: Any = None


DENSE = Sizes()
MOE = Sizes(family="qwen3_moe", moe=Moe())
MIXED = replace(MOE, family="glm4_moe", moe=Moe(shared_ffn_size=36, layers=(False,) + (True,) * 5))
