"""The loss of a critic by token, and how well its values explain what came."""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """A value loss by token."""

    loss: Tensor
    """As the values, float32, differentiable."""
    clipped: Tensor
    """bool: the clip holds the token's gradient at zero."""


def squared_error(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> ValueLoss:
    """max((V - R)², (V_old + clamp(V - V_old, -clip, clip) - R)²) / 2.

    Sources: PPO (Schulman et al. 2017), eq. 9, L^VF; the clip, which is of its reference code, Engstrom et al. 2020
    ("Implementation Matters in Deep Policy Gradients"), section 2. A value that has moved away from the return keeps
    its gradient; one that has moved towards it by more than `clip` since the update began has none.

    Args:
        values, old_values, returns: one shape; V now, V when the update began, and R. Masked entries must be finite.
        clip: None for the plain squared error.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    moved = values - old_values
    bound = (old_values + moved.clamp(-clip, clip) - returns).square() / 2
    # Within the clip the two differ by rounding alone.
    return ValueLoss(torch.maximum(plain, bound), (bound > plain) & (moved.abs() > clip))


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R): 1 where values foretell returns, 0 where they do no better than a constant.

    Both [n], finite. Returns a float64 scalar; NaN where returns do not vary, and so explain nothing.
    """
    values, returns = values.double(), returns.double()
    spread = (returns - returns.mean()).square().sum()
    error = returns - values
    return torch.where(spread > 0, 1 - (error - error.mean()).square().sum() / spread, torch.nan)
