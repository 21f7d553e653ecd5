"""One number a token from the last hidden states, in the place of Megatron's output layer."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ScalarHead(MegatronModule):
    """A linear map from hidden size to 1, whole on every tensor-parallel rank, computed in float32.

    Its weights are 0 until they are imported: a new head values everything at 0.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees its own tokens; Megatron sums the gradients of parameters so marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Hidden states `[s, b, hidden]` (`s / tp` under sequence parallelism) → values `[s, b, 1]`, all of them."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.config.sequence_parallel:
            # Every rank makes the same loss of all values, so each keeps the gradient of its own tokens, unsummed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
