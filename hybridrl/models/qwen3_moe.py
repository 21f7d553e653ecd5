"""Qwen3-MoE: Qwen3's attention, softmax-routed experts, dense layers where the configuration puts them."""

from collections.abc import Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES, MLP_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.models.weights import Role

NAMES: Mapping[Role, str] = {
    **ATTENTION_NAMES,
    **MLP_NAMES,
    Role.ROUTER: "model.layers.{layer}.mlp.gate.weight",
    Role.EXPERT_GATE: "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    Role.EXPERT_UP: "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    Role.EXPERT_DOWN: "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("qwen3_moe",))
    settings.only("use_sliding_window", False, default=False)
    bias = settings.flag("attention_bias", False)
    common = settings.common(default_kv_heads=4)
    moe = _moe(settings, common["num_layers"])
    settings.finish()
    return ModelSpec(**common, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe)


def _moe(settings: Settings, num_layers: int) -> MoeSpec | None:
    experts = settings.integer("num_experts", "num_local_experts", default=128, least=0)
    step = settings.integer("decoder_sparse_step", default=1)
    dense = set(settings.get("mlp_only_layers", []))
    layers = tuple(experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    if not any(layers):
        return None
    top_k = settings.integer("num_experts_per_tok", default=8)
    if top_k > experts:
        settings.note("num_experts_per_tok", top_k, f"at most num_experts={experts}")
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        ffn_size=settings.integer("moe_intermediate_size"),
        norm_topk_prob=settings.flag("norm_topk_prob", False),
        layers=layers,
        aux_loss_coef=settings.number("router_aux_loss_coef", 0.001),
    )
