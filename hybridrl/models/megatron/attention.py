"""Causal attention for the local specification, over padded batches and over packed sequences.

Megatron's local attention takes no packed sequences. This one runs torch's scaled dot-product attention on each
sequence by itself, so a pack costs what its sequences cost. It does no context parallelism and no dropout.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class CausalAttention(MegatronModule):
    """The core of self-attention, after the projections and the rotary embedding.

    Raises ValueError for context parallelism, which only Transformer Engine's attention does.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size}: the attention for CPUs supports 1 only"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of each position to itself and those before it in its sequence.

        Padded: query `[s, b, heads, d]`, key and value `[s, b, kv_heads, d]` → `[s, b, heads·d]`; padding must be on
        the right, where no real position sees it. Packed: `[t, heads, d]` and `[t, kv_heads, d]` → `[t, heads·d]`,
        the sequences bounded by `packed_seq_params.cu_seqlens_q` int32 `[n + 1]`.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention mask or bias given: batches are causal and padded on the right, without a mask")
        if packed_seq_params is None:
            output = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return output.permute(2, 0, 1, 3).flatten(2)
        return self._attend_packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]
    ) -> torch.Tensor:
        if bounds[-1] != query.shape[0]:
            raise ValueError(f"packed sequences end at {bounds[-1]}, the batch has {query.shape[0]} tokens")
        lengths = [stop - start for start, stop in pairwise(bounds)]
        sequences = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        outputs = [self._attend(*(x.transpose(0, 1)[None] for x in sequence)) for sequence in sequences]
        return torch.cat([output[0].transpose(0, 1) for output in outputs]).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[b, heads, s, d]` with `[b, kv_heads, s, d]` → `[b, heads, s, d]`; softmax in fp32."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
