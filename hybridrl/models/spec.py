"""What a model is, without saying how it is stored or computed: the sizes and switches of a decoder.

A `ModelSpec` is made by a family module (`hybridrl/models/<family>.py`) from a Hugging Face `config.json`. It is pure
data: layouts, the dry run and the Megatron configuration are all derived from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """The mixture-of-experts part of a model."""

    num_experts: int
    top_k: int
    ffn_size: int
    """Intermediate size of one expert."""
    norm_topk_prob: bool
    """True: the top-k weights are renormalised to sum to one (equal to softmax over the top-k logits)."""
    layers: tuple[bool, ...]
    """For each layer, whether it is an MoE layer."""
    score_function: str = "softmax"
    """`softmax` or `sigmoid` (DeepSeek-V3, GLM-4.5)."""
    correction_bias: bool = False
    """Whether the router has a per-expert bias used only for the choice (`e_score_correction_bias`, fp32)."""
    shared_ffn_size: int = 0
    """Intermediate size of all shared experts together; 0 for none."""
    num_shared_experts: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    aux_loss_coef: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, as its Hugging Face configuration describes it."""

    family: str
    """The Hugging Face `model_type`, and the name of the family's module."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Intermediate size of a dense layer's MLP."""
    vocab_size: int
    """Rows of the embedding in the checkpoint (may exceed the tokenizer's length)."""
    tied: bool
    """Whether `lm_head` is the embedding."""
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    mtp_layers: int = 0
    """Multi-token-prediction layers that the checkpoint holds after the main layers."""
    scalar_head: bool = False
    """One number a token in the place of `lm_head`: a critic or a reward model, `ForSequenceClassification` with one
    label in transformers."""
    dtype: str = "bfloat16"
    """The checkpoint's dtype, as torch names it."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Roles (see `hybridrl.models.weights.Role`) whose dtype differs from `dtype`."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether main layer `layer` (0-based) has experts."""
        return self.moe is not None and self.moe.layers[layer]
