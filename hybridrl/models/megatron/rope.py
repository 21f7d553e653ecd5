"""Rotary positions: frequencies by each way of scaling them, and the embedding that Megatron's attention takes.

Megatron's own Llama 3 scaling knows one of its four parameters only, and its embedding needs pinned memory under
context parallelism.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.zigzag import spans


class Rotary(RotaryEmbedding):
    """Angles `[s, 1, 1, rotated dimensions]` of the positions that this rank holds, or of all of a packed sequence.

    `amplitude` is what the cosines and sines are multiplied by (YaRN's attention factor); whoever applies the angles
    must do so.
    """

    def __init__(self, spec: ModelSpec, cp_group: dist.ProcessGroup) -> None:
        super().__init__(rotated_size(spec), 1.0, cp_group=cp_group)
        self.inv_freq = frequencies(spec).to(torch.cuda.current_device())
        self.amplitude = amplitude(spec)

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Positions from `offset` on, `max_seq_len` of them over all context-parallel ranks."""
        angles = self.get_emb(max_seq_len, offset)
        group = self.cp_group if cp_group is None else cp_group
        if packed_seq or group.size() == 1:
            return angles
        return torch.cat([angles[start:stop] for start, stop in spans(max_seq_len, group.rank(), group.size())])


def rotated_size(spec: ModelSpec) -> int:
    """How many of a head's dimensions positions rotate: the first ones, or latent attention's last ones."""
    return spec.mla.qk_rope_head_dim if spec.mla is not None else int(spec.head_dim * spec.partial_rotary_factor)


def frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position for each pair of rotated dimensions, fp32 `[rotated / 2]` (Su et al. 2021, section 3.2.2)."""
    size = rotated_size(spec)
    plain = 1.0 / spec.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":  # Chen et al. 2023, Position Interpolation, equation 4
        return plain / scaling["factor"]
    return _yarn(plain, spec.rope_theta, scaling) if scaling["rope_type"] == "yarn" else _llama3(plain, scaling)


def amplitude(spec: ModelSpec) -> float:
    """YaRN's factor of cosines and sines (Peng et al. 2023, section 3.4), 1 for other scalings.

    Where the configuration has both `mscale` and `mscale_all_dim` it is their ratio, and the latter's square goes into
    the softmax instead (DeepSeek-V2).
    """
    scaling = spec.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)


def amplitude_fields(spec: ModelSpec) -> dict[str, float]:
    """Attributes of Megatron's configuration by which its attention multiplies cosines and sines by `amplitude`; none
    where that is 1. Megatron computes the ratio of `yarn_mscale` of two weights, of which the second is 1 here."""
    factor = amplitude(spec)
    if factor == 1.0:
        return {}
    return {
        "yarn_rotary_scaling_factor": math.e,
        "yarn_mscale": 10.0 * (factor - 1.0),
        "yarn_mscale_all_dim": 0.0,
    }


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1·weight·ln(factor) + 1 for a factor above 1, else 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Wavelengths above `original / low_freq_factor` positions are stretched by `factor`, those below `original /
    high_freq_factor` stay, and those between are interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share_kept = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share_kept + (1.0 - share_kept) / scaling["factor"])


def _yarn(plain: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Peng et al. 2023, section 3.2: dimensions that turn more than `beta_fast` times over the original length stay,
    those that turn less than `beta_slow` times are stretched by `factor`, and those between are interpolated by index.
    """
    original, size = scaling["original_max_position_embeddings"], 2 * len(plain)

    def index_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / scaling["factor"] * stretched + plain * (1.0 - stretched)
