"""Self-attention whose fused projection is ordered as inference engines order it: all query rows of a rank, then its
key rows, then its value rows. Megatron interleaves them by key-value group.

With more tensor-parallel ranks than key-value heads, each rank has the whole key and value head that its queries use,
as in the engine: `copies` ranks in a row train replicas, where Megatron gathers the projection's output over all ranks.
"""

import copy
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.megatron.engine_shards import Heads, heads_factory


class Replicated(NamedTuple):
    """Rows of a parameter from `first` on, which `copies` tensor-parallel ranks in a row hold alike.

    Each computes a part of their gradient. Whoever trains them must add the parts up, and count them once in the norm.
    """

    first: int
    copies: int


class EngineAttention(SelfAttention):
    """Grouped-query attention over `[q; k; v]`.

    Where a key or value head is on several ranks, `linear_qkv`'s parameters are marked `replicated` (see `Replicated`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        tp = pg_collection.tp
        self.heads = Heads(
            config.num_attention_heads, config.num_query_groups, config.kv_channels, tp.size(), tp.rank()
        )
        if self.heads.copies > 1:  # to Megatron, as many heads as ranks
            config = copy.copy(config)
            config.num_query_groups = tp.size()
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        if self.heads.copies > 1:
            mark = Replicated(self.heads.local_queries * self.heads.size, self.heads.copies)
            for parameter in (self.linear_qkv.weight, self.linear_qkv.bias):
                if parameter is not None:
                    parameter.replicated = mark

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[s, b, hidden]` → query `[s, b, heads, d]`, key and value `[s, b, kv_heads, d]` of this rank, normalised.

        Raises ValueError for a gated output and for a fused rotary embedding, which take another order.
        """
        if output_gate or not split_qkv:
            raise ValueError(
                f"output_gate={output_gate}, split_qkv={split_qkv}: attention in the engine's layout supports neither "
                "a gated output nor a fused rotary embedding; use model.parameter_layout=megatron"
            )
        mixed, _ = self.linear_qkv(hidden_states)
        size, groups = self.heads.size, self.heads.local_groups
        rows = [self.heads.local_queries * size, groups * size, groups * size]
        query, key, value = (part.unflatten(-1, (-1, size)) for part in mixed.split(rows, dim=-1))
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoint, as the same whole tensors that its own attention writes and reads."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("weight", "bias"):
            key = f"{prefix}linear_qkv.{name}"
            if key in found:
                found[key] = heads_factory(found[key], self.heads, tuple(sharded_offsets))
        return found
