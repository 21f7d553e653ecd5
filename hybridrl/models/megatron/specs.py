"""Which modules a Megatron block is made of: ours behind the local specification, or Transformer Engine's."""

import copy
from functools import cache, partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.megatron.attention import CausalAttention
from hybridrl.models.megatron.engine_attention import EngineAttention
from hybridrl.models.megatron.latent_attention import LatentAttention
from hybridrl.models.megatron.norm import RMSNorm
from hybridrl.models.megatron.router import Router
from hybridrl.models.megatron.stacked_experts import StackedExperts
from hybridrl.models.spec import ModelSpec


def block_spec(
    spec: ModelSpec, config: TransformerConfig, *, chunk: int | None = None, engine_layout: bool = False
) -> TransformerBlockSubmodules:
    """The layers of this pipeline rank (with interleaving, of its model chunk `chunk`), dense or with experts each.

    `engine_layout` takes modules of ours wherever Megatron's hold parameters in another order than inference engines.
    """
    local = config.transformer_impl == "local"
    block = copy.deepcopy(
        get_gpt_decoder_block_spec(
            config, use_transformer_engine=not local, normalization=config.normalization, vp_stage=chunk
        )
    )
    for layer in block.layer_specs:
        if local:
            _use_local_modules(layer.submodules, spec)
        if spec.mla is not None:
            layer.submodules.self_attention.module = LatentAttention
            layer.submodules.self_attention.params["spec"] = spec
        if layer.submodules.mlp.module is MoELayer and spec.moe is not None:
            layer.submodules.mlp.submodules.router = partial(Router, moe=spec.moe)
        if engine_layout:
            _use_engine_layout(layer.submodules)
        _add_biases(layer.submodules, spec)
    if local:
        block.layer_norm = RMSNorm
    return block


def _use_local_modules(layer: Any, spec: ModelSpec) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if spec.mla is not None:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _use_engine_layout(layer: Any) -> None:
    """Dense MLPs and shared experts are [gate; up] on each rank already.

    Latent attention's projections up, which hold nearly all of it, are as the engine has them too; those down stay as
    Megatron has them.
    """
    if layer.self_attention.module is not LatentAttention:
        layer.self_attention.module = EngineAttention
    if layer.mlp.module is MoELayer:
        layer.mlp.submodules.experts = ModuleSpec(module=StackedExperts)


def _add_biases(layer: Any, spec: ModelSpec) -> None:
    """Megatron has one switch for the biases of all projections; these models have them projection by projection."""
    attention = layer.self_attention.submodules
    if spec.output_bias:
        attention.linear_proj = _with_bias(attention.linear_proj)
    if spec.mlp_bias and layer.mlp.module is MLP:
        mlp = layer.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = _with_bias(mlp.linear_fc1), _with_bias(mlp.linear_fc2)


@cache
def _with_bias(linear: type) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, *args, **{**kwargs, "bias": True})  # type: ignore[misc]

    return type(f"{linear.__name__}WithBias", (linear,), {"__init__": init})
