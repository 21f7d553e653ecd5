"""Estimators of KL(policy ‖ reference) from sampled tokens.

Source: Schulman, "Approximating KL Divergence" (2020). With d = log-prob of the policy - log-prob of the reference:
k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.registry import Registry

KlEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(log_probs, ref_log_probs) -> KL by token`, all of one shape; differentiable in `log_probs`."""

KL_ESTIMATORS: Registry[KlEstimator] = Registry("KL estimator")

MAX_LOG_RATIO = 20.0


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d. Unbiased; as a loss its gradient does not see the reference, so it belongs in the reward."""
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d²/2. As a loss, its gradient is that of the KL itself."""
    return (log_probs - ref_log_probs).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-d) - 1 + d, never negative. Constant below d = -20, where the exponential would overflow."""
    difference = (log_probs - ref_log_probs).clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Rewards by token: -coef·KL on every trained token, and the response's reward on the last of them.

    Source: InstructGPT (Ouyang et al. 2022), eq. 2, by token.

    Args:
        rewards: [n]; kl: [n, t]; mask: [n, t] bool. A response with no trained token gets 0 everywhere.

    Returns [n, t] float32.
    """
    tokens = torch.where(mask, -coef * kl, 0.0)
    place = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    last = torch.where(mask, place, -1).amax(-1, keepdim=True)
    return torch.where((place == last) & mask, tokens + rewards[:, None], tokens).float()
