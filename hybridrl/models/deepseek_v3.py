"""DeepSeek-V3 and what shares its architecture (Moonlight): latent attention, sigmoid-routed and shared experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.sigmoid_moe import MOE_NAMES, read_moe, tensors_with_prediction
from hybridrl.models.spec import MlaSpec, ModelSpec
from hybridrl.models.weights import Role, Tensor

NAMES: Mapping[Role, str] = {
    **{role: name for role, name in ATTENTION_NAMES.items() if role not in (Role.K, Role.V)},
    Role.Q_A: "model.layers.{layer}.self_attn.q_a_proj.weight",
    Role.Q_A_NORM: "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    Role.Q_B: "model.layers.{layer}.self_attn.q_b_proj.weight",
    Role.KV_A: "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    Role.KV_A_NORM: "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    Role.KV_B: "model.layers.{layer}.self_attn.kv_b_proj.weight",
    **MOE_NAMES,
}

LATENT_EPSILON = 1e-6
"""Of the norms of the latents, whatever the model's other norms have (DeepSeek's and transformers' code)."""


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("deepseek_v3",))
    settings.only("attention_bias", False, default=False)
    settings.only("rope_interleave", True, default=True)
    mla = MlaSpec(
        q_lora_rank=settings.integer("q_lora_rank") if settings.get("q_lora_rank") is not None else None,
        kv_lora_rank=settings.integer("kv_lora_rank"),
        qk_nope_head_dim=settings.integer("qk_nope_head_dim"),
        qk_rope_head_dim=settings.integer("qk_rope_head_dim"),
        v_head_dim=settings.integer("v_head_dim"),
    )
    common = settings.common(default_kv_heads=128)
    common["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    moe = read_moe(settings, common["num_layers"], groups=8, topk_groups=4, dense=3, scale=2.5)
    mtp_layers = settings.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    settings.finish()
    return ModelSpec(**common, moe=moe, mla=mla, mtp_layers=mtp_layers, dtypes={Role.ROUTER_BIAS: "float32"})


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """All tensors in layer order, prediction layers last."""
    return tensors_with_prediction(spec, NAMES)
