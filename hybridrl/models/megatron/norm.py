"""RMSNorm for the local specification. Megatron's own refuses sequence parallelism."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019, equation 4).

    Under sequence parallelism each TP rank sees other tokens, so Megatron must sum the weight's gradient over TP; it
    does for weights that say so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as the input."""
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
