"""Multi-head latent attention (DeepSeek-V2, section 2.1) with the gradient and the norms that the model was made with.

Megatron's own, in its local form, gives the key's rotary part the gradient of a rank's own heads alone, and both forms
take the model's norm epsilon for the norms of the latents. The parameters and their names are Megatron's.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from hybridrl.models.deepseek_v3 import LATENT_EPSILON
from hybridrl.models.megatron.rope import Rotary
from hybridrl.models.spec import ModelSpec


class LatentAttention(MLASelfAttention):
    """Attention whose keys and values are projected up from one latent a token, which all heads share.

    The projections down are cut by rows over tensor parallelism in the local specification, and whole on every rank in
    Transformer Engine's.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        spec: ModelSpec,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        self.rotary_pos_emb = Rotary(spec, self.pg_collection.cp)
        # Transformer Engine's projections up have the norms in them.
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: Any = getattr(self, name, None)
            if hasattr(module, "eps"):
                module.eps = LATENT_EPSILON

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[s, b, hidden]` → query and key `[s, b, heads, nope + rope]`, value `[s, b, heads, v]` of this rank's heads,
        and the latents of queries and of keys; packed, without the batch dimension.

        Raises ValueError for inference, which Megatron's own attention does.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("latent attention here is for training: there is no inference context")
        config, packed = self.config, packed_seq_params is not None
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        latent, rope_key = self._down(self.linear_kv_down_proj, hidden_states, rows).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        if config.sequence_parallel:
            rope_key = gather_from_sequence_parallel_region(rope_key, group=self.tp_group)
        else:  # each rank's heads have a part of its gradient
            rope_key = copy_to_tensor_model_parallel_region(rope_key, group=self.tp_group)
        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self._down(self.linear_q_down_proj, hidden_states, config.q_lora_rank)
        if packed:
            latent, rope_key, query_latent = latent.squeeze(1), rope_key.squeeze(1), query_latent.squeeze(1)
        latent = self.kv_layernorm(latent)
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(query_latent)
        heads = self._up(query_latent, latent)
        rotated = self._rotate(*heads, rope_key.unsqueeze(-2), hidden_states, packed_seq_params)
        return *rotated, query_latent, latent

    def _down(self, linear: torch.nn.Module, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """`[s, b, hidden]` → `[s, b, rows]`: all rows of this rank's tokens."""
        output, _ = linear(hidden)
        if output.shape[-1] != rows:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
            if self.config.sequence_parallel:
                output = scatter_to_sequence_parallel_region(output, group=self.tp_group)
        whole: torch.Tensor = output
        return whole

    def _up(self, query_latent: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[…, heads, nope + rope]`, keys without their rotary part `[…, heads, nope]`, values."""
        config = self.config
        linear = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = linear(query_latent)[0].unflatten(-1, (-1, self.q_head_dim))
        key_value = self.linear_kv_up_proj(latent)[0].unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim))
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        return query, key, value

    def _rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rope_key: torch.Tensor,
        hidden: torch.Tensor,
        packed: PackedSeqParams | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries rotated, keys with the rotated `[…, 1, rope]` in every head, and values."""
        config = self.config
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, config, packed)
        angles = self.rotary_pos_emb(length, packed_seq=packed is not None)
        bounds = None if packed is None else packed.cu_seqlens_q

        def turn(part: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = apply_rotary_pos_emb(
                part,
                angles,
                config=config,
                cu_seqlens=bounds,
                mscale=self.rotary_pos_emb.amplitude,
                cp_group=self.pg_collection.cp,
            )
            return result

        plain, rope_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        rope_key = turn(rope_key).expand(*key.shape[:-1], -1)
        query = torch.cat([plain, turn(rope_query)], dim=-1)
        return query, torch.cat([key, rope_key], dim=-1), value.contiguous()
