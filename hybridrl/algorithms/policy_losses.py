"""Policy losses by token: what a token costs, given how much more likely the policy now makes it."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.registry import Registry

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded before they are exponentiated, so that neither the ratio nor its gradient overflows."""


class TokenLoss(NamedTuple):
    """A policy loss by token."""

    loss: Tensor
    """As the log-probs, float32, differentiable."""
    ratio: Tensor
    """new / old probability, detached."""
    clipped: Tensor
    """bool: the clip (or the dual clip) holds the token's gradient at zero."""


PolicyLoss: TypeAlias = Callable[..., TokenLoss]
"""`(log_probs, old_log_probs, advantages, *, clip_low, clip_high, dual_clip) -> TokenLoss`, all of one shape."""

POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), r = exp(log_probs - old_log_probs).

    Sources: PPO (Schulman et al. 2017), eq. 7; separate bounds, DAPO (Yu et al. 2025), eq. 10; dual clip, which bounds
    the loss of negative advantages by -dual_clip·A, Ye et al. 2020, eq. 5.

    All tensors have one shape; masked entries must be finite. Raises ValueError for `dual_clip` of 1 or less.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip={dual_clip} must exceed 1, or be None")
    ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    bound = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, bound)
    clipped = bound > plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return TokenLoss(loss, ratio.detach(), clipped)
