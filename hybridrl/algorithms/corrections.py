"""Importance weights for samples that another policy drew: the engine's, which is never quite the trainer's.

With ρ = π_trainer / π_engine of a token (both before the update), the weight of a token is, by `level`,

    token       ρ                        TIS, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You
                                         Off-Policy RL Training")
    sequence    Π ρ over its response    the unbiased weight; MIS, Liu et al. 2025 ("When Speed Kills Stability")
    geometric   (Π ρ)^(1 / length)       the same by token, which does not grow with the length

Weights are truncated to an interval (TIS), or what lies outside one is rejected (token: IcePop, Ling team 2025;
sequence and geometric: whole responses). A rejected token is no longer trained: it leaves the loss, its denominator and
every metric.
"""

import torch
from torch import Tensor

from hybridrl.algorithms.segments import Segments

LEVELS = ("token", "sequence", "geometric")

MAX_LOG_WEIGHT = 20.0
"""Log-weights are bounded before they are exponentiated; no bound of an interval may be near exp(20)."""


def importance_weights(log_ratios: Tensor, segments: Segments, level: str) -> Tensor:
    """[t] float64, untruncated: the weight of each trained token.

    Args:
        log_ratios: [t] float: the trainer's log-prob minus the engine's.
        segments: the response of each token; every trained token of a response is there.

    Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"algorithm.correction: level {level!r} is none of {', '.join(LEVELS)}")
    log_ratios = log_ratios.double()
    if level == "sequence":
        log_ratios = segments.spread(segments.total(log_ratios))
    elif level == "geometric":
        log_ratios = segments.spread(segments.mean(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool)))
    return log_ratios.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def effective_sample_size(weights: Tensor) -> Tensor:
    """Scalar in (0, 1]: (Σw)² / (n·Σw²), the share of the samples that the weighted ones are worth (Kish 1965).

    1 for no samples.
    """
    if not len(weights):
        return weights.new_ones(())
    return weights.sum().square() / (len(weights) * weights.square().sum())
