"""Latent attention as the trainer computes it, and without copies of its weights."""

import torch

from hybridrl.models.deepseek_v3 import LATENT_EPSILON
from hybridrl.rollout.sglang import internals as sg


def match_trainer(model: torch.nn.Module) -> None:
    """Has each layer of latent attention compute with the trainer's epsilon, and with views of `kv_b_proj`.

    SGLang norms latents by the model's epsilon, where the published models have one of their own (they differ in
    Moonlight). And it copies the absorbed projections out of `kv_b_proj` after loading (`w_kc` and `w_vc`: W^UK and
    W^UV of DeepSeek-V2, section 2.1.2): on DeepSeek-V3 with data-parallel attention 2 GB a rank, and stale after each
    sync. A matrix product takes an operand where it lies, so here they are views: no bytes, and never older than the
    parameter. `w_kc` is [heads, qk_nope_head_dim, kv_lora_rank], `w_vc` [heads, kv_lora_rank, v_head_dim], both of the
    rank's heads.

    To be done before weights go into service, since `kv_b_proj` may have been re-pointed. Models of other attention
    stay as they are.
    """
    for module in model.modules():
        if isinstance(module, sg.DeepseekV2AttentionMLA):
            sizes = [module.qk_nope_head_dim, module.v_head_dim]
            keys, values = module.kv_b_proj.weight.data.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
            module.w_kc, module.w_vc = keys, values.transpose(1, 2)
            module.kv_a_layernorm.variance_epsilon = LATENT_EPSILON
            if module.q_lora_rank is not None:
                module.q_a_layernorm.variance_epsilon = LATENT_EPSILON
