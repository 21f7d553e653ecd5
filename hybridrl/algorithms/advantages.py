"""Advantages of whole responses, from their rewards and the group each belongs to."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.registry import Registry

AdvantageEstimator: TypeAlias = Callable[..., Tensor]
"""`(rewards [n], group_ids [n], valid [n] bool, *, normalize) -> advantages [n] float32`"""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")

NORMALIZATIONS = ("sample_std", "population_std", "none")


@ADVANTAGES.register("grpo")
def grpo(
    rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, normalize: str = "sample_std", eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages: (reward - mean of the group) / (deviation of the group + eps).

    Source: DeepSeekMath (Shao et al. 2024), section 4.1.2; without the deviation, Dr. GRPO (Liu et al. 2025), eq. 2.

    Args:
        rewards: [n], float; statistics are taken in float64.
        group_ids: [n], integer; responses with one id are a group, wherever they stand.
        valid: [n] bool; the rest (a failed judge) is outside all statistics and gets 0. None: all are valid.
        normalize: `sample_std` (over n - 1), `population_std` (over n) or `none`.

    Returns [n] float32. Groups of one, and groups whose rewards differ by no more than float32 can tell, get exactly 0.
    Raises ValueError for mismatched shapes, an unknown `normalize`, or a valid reward that is not finite.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    _check(rewards, group_ids, valid, normalize)
    values = torch.where(valid, rewards, 0).double()
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(groups).index_add(0, group, x)

    count = total(valid.double())
    mean = total(values) / count.clamp(min=1)
    centred = torch.where(valid & _differs(values, valid, group, groups)[group], values - mean[group], 0)
    if normalize != "none":
        freedom = count - 1 if normalize == "sample_std" else count
        deviation = (total(centred.square()) / freedom.clamp(min=1)).sqrt()
        centred = centred / (deviation[group] + eps)
    return centred.float()


def _differs(values: Tensor, valid: Tensor, group: Tensor, groups: int) -> Tensor:
    """[groups] bool: whether a group's rewards differ by more than the rounding of float32."""
    inf = float("inf")
    high = values.new_full((groups,), -inf).scatter_reduce(0, group, torch.where(valid, values, -inf), "amax")
    low = values.new_full((groups,), inf).scatter_reduce(0, group, torch.where(valid, values, inf), "amin")
    resolution = 4 * torch.finfo(torch.float32).eps * torch.maximum(high.abs(), low.abs())
    return high - low > resolution


def _check(rewards: Tensor, group_ids: Tensor, valid: Tensor, normalize: str) -> None:
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"algorithm.normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
    if not rewards.shape == group_ids.shape == valid.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)} and valid {tuple(valid.shape)} "
            "must be vectors of one length"
        )
    bad = (~torch.isfinite(rewards) & valid).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards at {bad} are not finite: {rewards[bad].tolist()}; mark failed samples invalid instead"
        )
