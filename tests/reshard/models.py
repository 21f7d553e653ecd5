"""Tiny models of all families, as the published configurations would describe them, for layouts and plans."""

from typing import Any

from hybridrl.models.families import spec_from_config, weight_map
from hybridrl.models.weights import WeightMap

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_SIGMOID = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", **_COMMON, **_EXPERTS, "num_experts": 8},
    "qwen3_moe_tied": {
        "model_type": "qwen3_moe", **_COMMON, **_EXPERTS, "num_experts": 8, "tie_word_embeddings": True
    },
    "mixtral": {"model_type": "mixtral", **_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "qwen2_tied": {"model_type": "qwen2", **_COMMON, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_COMMON, "attention_bias": True},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_COMMON, **_SIGMOID, **_LATENT, "num_key_value_heads": 8, "q_lora_rank": 12
    },
    "deepseek_v3_whole_q": {
        "model_type": "deepseek_v3", **_COMMON, **_SIGMOID, **_LATENT, "num_key_value_heads": 8, "q_lora_rank": None
    },
    "glm4_moe": {"model_type": "glm4_moe", **_COMMON, **_SIGMOID, "attention_bias": True, "use_qk_norm": True},
}  # fmt: skip


def weights(name: str, **settings: Any) -> WeightMap:
    """The weight map of a tiny model, with some settings changed."""
    return weight_map(spec_from_config({**CONFIGS[name], **settings}))
