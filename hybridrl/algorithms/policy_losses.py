"""Policy losses by token: what a token costs, given how much more likely the policy now makes it."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.kl import k3
from hybridrl.algorithms.registry import Registry
from hybridrl.algorithms.segments import Segments

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded before they are exponentiated, so that neither the ratio nor its gradient overflows."""


class TokenLoss(NamedTuple):
    """A policy loss by token."""

    loss: Tensor
    """As the log-probs, float32, differentiable."""
    ratio: Tensor
    """new / old probability, detached."""
    clipped: Tensor
    """bool: a clip is at work on the token: its gradient is held at zero, or its weight at a bound (CISPO)."""


PolicyLoss: TypeAlias = Callable[..., TokenLoss]
"""Takes `log_probs`, `old_log_probs` and `advantages`, of one shape, and those that it names of: `mask` (bool) and
`segments`, the trained tokens and the response of each; `selected` (bool), the tokens of high covariance; `clip_low`,
`clip_high`, `dual_clip` and `covariance_coef`, the recipe's. Masked entries must be finite."""

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
    ratio = _ratio(log_probs, old_log_probs)
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


@POLICY_LOSSES.register("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    segments: Segments,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """As `ppo_clip`, with one ratio for a whole response: s = exp(mean of its tokens' log-ratios).

    Source: GSPO (Zheng et al. 2025), eqs. 5 and 7, in the form of GSPO-token (section 4.3): a token's ratio is
    sg[s]·π / sg[π], whose value is s, and whose gradient, averaged over the tokens of a response
    (`aggregate=seq_mean_token_mean`), is that of s itself. The mean is over trained tokens.
    """
    mean = segments.spread(segments.mean((log_probs - old_log_probs).detach(), mask))
    return ppo_clip(
        log_probs - log_probs.detach() + mean,
        torch.zeros_like(mean),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@POLICY_LOSSES.register("cispo")
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)]·A·log_probs: the weight is clipped, and no token loses its gradient.

    Source: CISPO, MiniMax-M1 (Chen et al. 2025), eqs. 4 and 5. The paper sets no lower bound: `clip_low=1`.
    """
    ratio = _ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * advantages * log_probs, ratio, weight != ratio)


@POLICY_LOSSES.register("policy_gradient")
def policy_gradient(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A·log_probs: no ratio and no clip.

    Sources: REINFORCE (Williams 1992); the loss of GPG (Chu et al. 2025) and OPO (Hao et al. 2025).
    """
    ratio = _ratio(log_probs, old_log_probs).detach()
    return TokenLoss(-advantages * log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@POLICY_LOSSES.register("clip_cov")
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    selected: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """`ppo_clip`, and 0 on the selected tokens, a few of those whose update would cost most entropy.

    Source: Clip-Cov, Cui et al. 2025 ("The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models").
    `selected` comes from `hybridrl.algorithms.covariance.select_in_range`.
    """
    found = ppo_clip(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return TokenLoss(torch.where(selected, 0, found.loss), found.ratio, found.clipped | selected)


@POLICY_LOSSES.register("kl_cov")
def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, selected: Tensor, covariance_coef: float
) -> TokenLoss:
    """-r·A, and coef·KL(old ‖ new) on the selected tokens, those whose update would cost most entropy. No clip.

    Source: KL-Cov, Cui et al. 2025. The KL of a token is estimated by k3, r - 1 - log r, whose gradient r - 1 vanishes
    where nothing has moved. (The gradient of |log r|, another form in use, is the sign of rounding noise there.)
    `selected` comes from `hybridrl.algorithms.covariance.select_highest`.
    """
    ratio = _ratio(log_probs, old_log_probs)
    penalty = covariance_coef * k3(old_log_probs, log_probs)
    loss = torch.where(selected, penalty, 0) - ratio * advantages
    return TokenLoss(loss, ratio.detach(), torch.zeros_like(selected))


def _ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
