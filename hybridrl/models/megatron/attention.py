"""Causal attention for the local specification, over padded batches and over packed sequences.

Megatron's local attention takes no packed sequences. This one runs torch's scaled dot-product attention on each
sequence by itself, so a pack costs what its sequences cost. Under context parallelism each rank gathers the keys and
values of all, in Megatron's order (`hybridrl.parallel.zigzag`). It does no dropout.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.parallel.zigzag import chunks


class CausalAttention(MegatronModule):
    """The core of self-attention, after the projections and the rotary embedding.

    Raises ValueError for context parallelism without `pg_collection.cp`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.ranks = config.context_parallel_size
        self.group = pg_collection.cp if pg_collection is not None and self.ranks > 1 else None
        if self.ranks > 1 and self.group is None:
            raise ValueError(f"context_parallel_size={self.ranks}, but no group of so many ranks was given")

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
        the sequences bounded by `packed_seq_params.cu_seqlens_q` int32 `[n + 1]`. A value's d may be another one.

        Under context parallelism s and t are those of this rank's chunks, the bounds those of whole sequences.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention mask or bias given: batches are causal and padded on the right, without a mask")
        if packed_seq_params is None:
            return self._attend_all(query, key, value, [len(query)]).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if bounds[-1] != len(query) * self.ranks:
            raise ValueError(f"packed sequences end at {bounds[-1]}, the batch has {len(query) * self.ranks} tokens")
        lengths = [(stop - start) // self.ranks for start, stop in pairwise(bounds)]
        return self._attend_all(query[:, None], key[:, None], value[:, None], lengths)[:, 0].flatten(1)

    def _attend_all(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """`[s, b, heads, d]`, sequences of these lengths on this rank one after another along s."""
        queries, keys, values = query.split(lengths), *self._whole(key, value, lengths)
        outputs = [self._attend(*sequence) for sequence in zip(queries, keys, values, strict=True)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _whole(
        self, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Keys and values of each sequence, of all context-parallel ranks, in the order of their positions."""
        if self.group is None:
            return key.split(lengths), value.split(lengths)
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.group)
        held = [chunk for rank in range(self.ranks) for chunk in chunks(rank, self.ranks)]
        order = sorted(range(len(held)), key=held.__getitem__)
        found = []
        for sequence in both.unflatten(0, (self.ranks, -1)).split(lengths, dim=1):
            by_chunk = sequence.unflatten(1, (2, -1)).flatten(0, 1)
            found.append(torch.cat([by_chunk[i] for i in order]))
        pairs = [x.split([key.shape[-1], value.shape[-1]], dim=-1) for x in found]
        return [k for k, _ in pairs], [v for _, v in pairs]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One sequence: `[s, b, heads, d]` with `[s · CP, b, kv_heads, d]` → `[s, b, heads, d]`; softmax in fp32."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        held = chunks(self.group.rank(), self.ranks) if self.group is not None else (0,)
        size = query.shape[2] // len(held)
        parts = [
            self._attend_chunk(part, key, value, first=chunk * size)
            for part, chunk in zip(query.split(size, dim=2), held, strict=True)
        ]
        output = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return output.permute(2, 0, 1, 3)

    def _attend_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int) -> torch.Tensor:
        """`[b, heads, n, d]` at positions `first` and on, with the keys and values up to its last one."""
        size = query.shape[2]
        seen = None  # torch's own causal mask, which starts at position 0
        if first:
            seen = torch.ones(size, first + size, dtype=torch.bool, device=query.device).tril(first)
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key[:, :, : first + size],
            value[:, :, : first + size],
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
