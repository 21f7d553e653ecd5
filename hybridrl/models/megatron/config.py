"""A model and a run's settings → Megatron's `TransformerConfig`: everything that changes the function computed."""

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hybridrl.config.schema import Config
from hybridrl.models.megatron import checks
from hybridrl.models.megatron.rope import amplitude_fields
from hybridrl.models.settings import UnsupportedModelError
from hybridrl.models.spec import MlaSpec, ModelSpec, MoeSpec


def uses_transformer_engine() -> bool:
    """Whether models are made of Transformer Engine's modules here (on CUDA), whose parameters have other names."""
    return torch.cuda.is_available()


def transformer_config(spec: ModelSpec, config: Config) -> TransformerConfig:
    """Megatron's configuration for this machine: the local implementation on a CPU, Transformer Engine's on a GPU.

    Weights are set to zero at construction (they are imported afterwards), by an initialisation of Megatron's own,
    which also marks the parameters that are sharded. Raises UnsupportedModelError with every setting that Megatron
    cannot honour.
    """
    fused = uses_transformer_engine()
    problems = checks.problems(spec, config)
    if fused and find_spec("transformer_engine") is None:
        problems.append("CUDA without Transformer Engine; supported: with it, `pip install 'hybridrl[gpu]'`")
    if problems:
        raise UnsupportedModelError("training this model so", problems)
    fields = {
        **_architecture(spec),
        **_parallelism(config),
        **_arithmetic(config),
        **_recompute(config.model.recompute),
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        "embedding_init_method": torch.nn.init.zeros_,
        "transformer_impl": "transformer_engine" if fused else "local",
    }
    if spec.moe is not None:
        fields |= _experts(spec.moe, config, grouped=fused)
    if spec.mla is not None:
        return MLATransformerConfig(**fields, **_latent_attention(spec, spec.mla))
    made = TransformerConfig(**fields)
    for name, value in amplitude_fields(spec).items():  # which Megatron looks for without declaring them
        setattr(made, name, value)
    return made


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_norm or spec.mla is not None,  # latent attention's norms go by the same switch
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_qkv_bias": spec.qkv_bias,
        "add_bias_linear": False,  # all biases or none; specs.py adds those of one projection
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallelism(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "sequence_parallel": checks.uses_sequence_parallel(config),
        "variable_seq_lengths": parallel.pp > 1,  # micro-batches differ in tokens
        # Between two stages, one batch of sends and receives would pair a gradient with an activation.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        "moe_token_dispatcher_type": "alltoall",  # the default forbids that, for models without experts too
    }


def _arithmetic(config: Config) -> dict[str, Any]:
    dtype = getattr(torch, config.model.dtype)
    return {
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "calculate_per_token_loss": True,  # the loss is a sum over tokens, weighted by whoever makes it
    }


def _recompute(kind: str) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _latent_attention(spec: ModelSpec, mla: MlaSpec) -> dict[str, Any]:
    """The softmax's scale is made of these; angles and their amplitude are `hybridrl.models.megatron.rope`'s."""
    scaling = spec.rope_scaling or {}
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": spec.rope_theta,
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
    }


def _experts(moe: MoeSpec, config: Config, *, grouped: bool) -> dict[str, Any]:
    balanced = config.model.aux_loss_coef > 0
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_layer_freq": [int(has_experts) for has_experts in moe.layers],
        # Megatron's own choice is not used (see `Router`), but checked, and told in its logs.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_score_function": moe.score_function,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
        "moe_aux_loss_coeff": config.model.aux_loss_coef,
        "moe_grouped_gemm": grouped,
    }
