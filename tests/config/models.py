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
    num_layers: int = 6
    num_heads: int = 12
    num_kv_heads: int = 4
    ffn_size: int = 96
    max_positions: int = 4096
    moe: Moe | None = None
    mla: Any = None
    rope_scaling: Any = None


DENSE = Sizes()
MOE = Sizes(moe=Moe())
MIXED = replace(MOE, moe=Moe(shared_ffn_size=36, layers=(False,) + (True,) * 5))
