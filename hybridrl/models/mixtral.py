"""Mixtral: Llama's attention and softmax-routed experts whose top-k weights are normalised."""

from collections.abc import Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.models.weights import Role

NAMES: Mapping[Role, str] = {
    **ATTENTION_NAMES,
    Role.ROUTER: "model.layers.{layer}.block_sparse_moe.gate.weight",
    Role.EXPERT_GATE: "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    Role.EXPERT_UP: "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    Role.EXPERT_DOWN: "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("mixtral",))
    settings.only("sliding_window", None, default=None)
    settings.only("router_jitter_noise", 0, 0.0, default=0.0)
    common = settings.common(default_kv_heads=8, rope_theta=1e6, norm_eps=1e-5)
    experts = settings.integer("num_local_experts", "num_experts", default=8)
    top_k = settings.integer("num_experts_per_tok", default=2)
    if top_k > experts:
        settings.note("num_experts_per_tok", top_k, f"at most num_local_experts={experts}")
    moe = MoeSpec(
        num_experts=experts,
        top_k=top_k,
        ffn_size=common["ffn_size"],
        norm_topk_prob=True,
        layers=(True,) * common["num_layers"],
        aux_loss_coef=settings.number("router_aux_loss_coef", 0.001),
    )
    settings.finish()
    return ModelSpec(**common, moe=moe)
