"""The MoE dispatcher's side stream, on which it copies counts to the host."""

from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch


@patch(
    where="MoEAlltoAllTokenDispatcher (transformer/moe/token_dispatcher.py)",
    reason="torch.cuda.Stream requires CUDA",
)
def dispatcher_stream() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def counts_to_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        """The counts are on the host already; the splits become NumPy arrays as they do on a GPU."""
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # any value but None: no stream is made
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_to_host
