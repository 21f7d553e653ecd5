"""Tokens whose update costs most entropy: those where log-prob and advantage are high, or low, together.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models". The covariance
of a token is (log π - mean of log π)·(A - mean of A), with means over the batch of an update. It is taken under the
log-probs that the batch was given (`old_log_probs`), so that the choice does not depend on how the batch is cut.
"""

import torch
from torch import Tensor


def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """[t] float64 of the trained tokens [t] of a whole update. Their mean is what the policy's entropy falls by."""
    return _centred(log_probs) * _centred(advantages)


def select_in_range(cov: Tensor, *, low: float, high: float, fraction: float, seed: int) -> Tensor:
    """[t] bool: tokens drawn at random from those with a covariance in [low, high] (Clip-Cov).

    `fraction` of all t tokens are drawn, at least one, and no more than there are. The draw depends on `seed` alone.
    """
    candidates = ((cov >= low) & (cov <= high)).nonzero().flatten()
    drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[: _count(cov, fraction)]
    return _chosen(cov, candidates[drawn.to(candidates.device)])


def select_highest(cov: Tensor, *, fraction: float) -> Tensor:
    """[t] bool: `fraction` of the tokens, at least one, with the highest covariances (KL-Cov). Of equals the first."""
    return _chosen(cov, cov.sort(descending=True, stable=True).indices[: _count(cov, fraction)])


def _centred(values: Tensor) -> Tensor:
    values = values.double()
    return values - values.mean() if len(values) else values


def _count(cov: Tensor, fraction: float) -> int:
    return max(1, int(fraction * len(cov)))


def _chosen(cov: Tensor, places: Tensor) -> Tensor:
    selected = torch.zeros(len(cov), dtype=torch.bool, device=cov.device)
    selected[places] = True
    return selected
