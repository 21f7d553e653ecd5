"""Megatron's parameters of latent attention (DeepSeek-V3) and of shared experts, before they are cut."""

from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role
from hybridrl.reshard.layouts.slabs import Slab, columns, rows, stacked, whole


def shared_problems(spec: ModelSpec, tp: int) -> list[str]:
    """Whether TP divides the shared experts, with the numbers."""
    shared = spec.moe.shared_ffn_size if spec.moe else 0
    return [f"the shared experts' intermediate size {shared} is not a multiple of tp={tp}"] if shared % tp else []


def latent_attention(spec: ModelSpec, tp: int, transformer_engine: bool) -> tuple[list[Slab], list[Slab]]:
    """The output projection, and the rest: Megatron registers them in this order.

    The projections down are whole on every rank in Transformer Engine's spec, where the norms after them are fused
    into the projections up; the local spec cuts them by rows and has the norms by themselves.
    """
    assert spec.mla is not None
    mla, hidden, heads = spec.mla, spec.hidden_size, spec.num_heads
    down_tp = 1 if transformer_engine else tp
    q_rows = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    kv_shape = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    kv_down = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    at, norm = "self_attention.", "layer_norm_weight" if transformer_engine else None
    kv_norm = whole(at + (f"linear_kv_up_proj.{norm}" if norm else "kv_layernorm.weight"), Role.KV_A_NORM, kv_shape[1:])
    kv = [rows(at + "linear_kv_down_proj.weight", Role.KV_A, kv_down, down_tp)]
    kv_up = rows(at + "linear_kv_up_proj.weight", Role.KV_B, kv_shape, tp)
    before = [columns(at + "linear_proj.weight", Role.O, (hidden, heads * mla.v_head_dim), tp)]
    if mla.q_lora_rank is None:
        q, norms = [rows(at + "linear_q_proj.weight", Role.Q, (q_rows, hidden), tp)], []
    else:
        rank = mla.q_lora_rank
        q_norm = whole(at + (f"linear_q_up_proj.{norm}" if norm else "q_layernorm.weight"), Role.Q_A_NORM, (rank,))
        q = [rows(at + "linear_q_down_proj.weight", Role.Q_A, (rank, hidden), down_tp)]
        q += [q_norm] if norm else []
        q.append(rows(at + "linear_q_up_proj.weight", Role.Q_B, (q_rows, rank), tp))
        norms = [q_norm]
    if norm:
        return before, [*q, *kv, kv_norm, kv_up]
    return before, [*q, *kv, kv_up, *norms, kv_norm]


def shared_experts(spec: ModelSpec, tp: int) -> list[Slab]:
    """The shared experts as one MLP, cut over TP; none where the model has none."""
    assert spec.moe is not None
    size, hidden = spec.moe.shared_ffn_size, spec.hidden_size
    if not size:
        return []
    roles = (Role.SHARED_GATE, Role.SHARED_UP)
    return [
        stacked("mlp.shared_experts.linear_fc1.weight", roles, size, (hidden,), tp),
        columns("mlp.shared_experts.linear_fc2.weight", Role.SHARED_DOWN, (hidden, size), tp),
    ]
