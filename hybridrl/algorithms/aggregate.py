"""One reduction for every loss: a weight for each token, taken over the whole global batch.

loss = Σ weight·loss(token), so it is the same number, with the same gradient, however the batch is cut into ranks,
micro-batches or packs. Within one response all tokens weigh alike, so a mode gives one weight a response:

    token_mean                1 / T            DAPO (Yu et al. 2025), eq. 8
    seq_mean_token_mean       1 / (N·length)   GRPO (Shao et al. 2024), eq. 3
    seq_mean_token_sum        1 / N
    seq_mean_token_sum_norm   1 / (N·L)        Dr. GRPO (Liu et al. 2025), L a constant

T is the number of trained tokens of the batch, N that of responses with at least one.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.registry import Registry

Aggregate: TypeAlias = Callable[[Tensor, int | None], Tensor]
"""`(lengths [n] float64, L) -> weight of a token of each response [n] float64`, for responses that have any."""

AGGREGATES: Registry[Aggregate] = Registry("loss aggregation")


@AGGREGATES.register("token_mean")
def token_mean(lengths: Tensor, norm: int | None) -> Tensor:
    """Mean over all trained tokens."""
    return (1 / lengths.sum()).expand_as(lengths)


@AGGREGATES.register("seq_mean_token_mean")
def seq_mean_token_mean(lengths: Tensor, norm: int | None) -> Tensor:
    """Mean over responses of the mean over their tokens."""
    return 1 / (len(lengths) * lengths)


@AGGREGATES.register("seq_mean_token_sum")
def seq_mean_token_sum(lengths: Tensor, norm: int | None) -> Tensor:
    """Mean over responses of the sum over their tokens."""
    return torch.full_like(lengths, 1 / len(lengths))


@AGGREGATES.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(lengths: Tensor, norm: int | None) -> Tensor:
    """Mean over responses of the sum over their tokens, over a constant length that no batch changes."""
    if norm is None or norm < 1:
        raise ValueError(
            f"algorithm.aggregate=seq_mean_token_sum_norm needs aggregate_length of at least 1, not {norm}"
        )
    return torch.full_like(lengths, 1 / (len(lengths) * norm))


def token_weights(mode: str, lengths: Tensor, norm: int | None = None) -> Tensor:
    """The weight of a trained token of each response of the global batch.

    Args:
        mode: a registered aggregation.
        lengths: [n] integer: trained tokens of each response of the whole batch, over all ranks and micro-batches.
        norm: L of `seq_mean_token_sum_norm`.

    Returns [n] float64; 0 for a response without trained tokens, so a batch without any has loss 0.
    """
    function = AGGREGATES[mode]
    trained = lengths > 0
    weights = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
    if bool(trained.any()):
        weights[trained] = function(lengths[trained].double(), norm)
    return weights
