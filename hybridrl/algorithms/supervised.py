"""The loss of supervised fine-tuning."""

from torch import Tensor


def sft(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood by token: the cross-entropy against the demonstration."""
    return -log_probs
