"""The parameters of a Megatron GPT model before they are cut, from a model's sizes: what `MegatronLayout` places."""

from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron_mla import latent_attention, shared_experts, shared_problems
from hybridrl.reshard.layouts.slabs import Slab, attention_rows, columns, interleaved, rows, stacked, whole

EXPERT_NAMES = {
    "local": (
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    ),
    "te": ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.linear_fc2.weight{expert}"),
    "engine": ("mlp.experts.w13", "mlp.experts.w2"),
}
"""Parameters of the experts in each kind of module: one for each local expert, or one for all of them."""


class OuterSlabs(NamedTuple):
    """Parameters outside the layers: of the first chunk, and of the last one."""

    first: Slab
    last: tuple[Slab, ...]


def dense_problems(spec: ModelSpec, sizes: ParallelSizes) -> list[str]:
    """Every size that the model does not divide by, each with its numbers."""
    tp, found = sizes.tp, []
    if spec.num_heads % tp:
        found.append(f"num_attention_heads={spec.num_heads} is not a multiple of tp={tp}")
    if spec.mla is None and spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        found.append(f"num_key_value_heads={spec.num_kv_heads} and tp={tp}: neither is a multiple of the other")
    if not all(spec.is_moe_layer(i) for i in range(spec.num_layers)) and spec.ffn_size % tp:
        found.append(f"intermediate_size={spec.ffn_size} is not a multiple of tp={tp}")
    if spec.moe is None:
        return found + ([f"ep={sizes.ep} for a model without experts"] if sizes.ep > 1 else [])
    found += shared_problems(spec, tp)
    if spec.moe.num_experts % sizes.ep:
        found.append(f"num_experts={spec.moe.num_experts} is not a multiple of ep={sizes.ep}")
    if spec.moe.ffn_size % sizes.etp:
        found.append(f"the experts' intermediate size {spec.moe.ffn_size} is not a multiple of etp={sizes.etp}")
    return found


def outer_slabs(spec: ModelSpec, sizes: ParallelSizes, padded: int) -> OuterSlabs:
    """Embedding; final norm and head. A tied head is the embedding, copied to the last stage where that is another;
    a scalar head is whole on every rank of the last stage."""
    vocabulary = (spec.vocab_size, spec.hidden_size)
    last = [whole("decoder.final_layernorm.weight", Role.FINAL_NORM, (spec.hidden_size,))]
    if spec.scalar_head:
        last.append(whole("output_layer.weight", Role.SCORE, (1, spec.hidden_size)))
    elif not spec.tied or sizes.pp > 1:
        role = Role.EMBED if spec.tied else Role.LM_HEAD
        last.append(rows("output_layer.weight", role, vocabulary, sizes.tp, padded=padded))
    first = rows("embedding.word_embeddings.weight", Role.EMBED, vocabulary, sizes.tp, padded=padded)
    return OuterSlabs(first, tuple(last))


def layer_slabs(
    spec: ModelSpec, sizes: ParallelSizes, *, moe: bool, transformer_engine: bool, engine_order: bool = False
) -> Sequence[Slab]:
    """Parameters of a layer in module order; there is one slab for all experts of a projection."""
    hidden = (spec.hidden_size,)
    fused_input = transformer_engine and spec.mla is None
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused_input else "input_layernorm.weight"
    fused = transformer_engine and not moe
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    norm = whole(input_norm, Role.INPUT_NORM, hidden)
    if spec.mla is None:
        before, after = _attention(spec, sizes.tp, engine_order)
    else:
        before, after = latent_attention(spec, sizes.tp, transformer_engine)
    slabs = [*before, norm, *after] if fused_input else [norm, *before, *after]
    slabs.append(whole(mlp_norm, Role.POST_ATTENTION_NORM, hidden))
    if not moe:
        return slabs + _dense(spec, sizes.tp)
    names = EXPERT_NAMES["engine" if engine_order else "te" if transformer_engine else "local"]
    return slabs + _experts(spec, sizes, *names)


def _attention(spec: ModelSpec, tp: int, engine_order: bool) -> tuple[list[Slab], list[Slab]]:
    """The output projection, and the rest: Megatron registers them in this order."""
    size, hidden = spec.head_dim, (spec.hidden_size,)
    before = [columns("self_attention.linear_proj.weight", Role.O, (spec.hidden_size, spec.num_heads * size), tp)]
    if spec.output_bias:
        before.append(whole("self_attention.linear_proj.bias", Role.O_BIAS, hidden))
    fuse = _engine_qkv if engine_order else _megatron_qkv
    after = [fuse("self_attention.linear_qkv.weight", (Role.Q, Role.K, Role.V), spec, hidden, tp)]
    if spec.qkv_bias:
        biases = (Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS)
        after.append(fuse("self_attention.linear_qkv.bias", biases, spec, (), tp))
    if spec.qk_norm:
        after.append(whole("self_attention.q_layernorm.weight", Role.Q_NORM, (size,)))
        after.append(whole("self_attention.k_layernorm.weight", Role.K_NORM, (size,)))
    return before, after


def _megatron_qkv(name: str, roles: Sequence[Role], spec: ModelSpec, rest: tuple[int, ...], tp: int) -> Slab:
    share = spec.num_heads // spec.num_kv_heads
    rows_by_group = (share * spec.head_dim, spec.head_dim, spec.head_dim)
    return interleaved(name, roles, rows_by_group, spec.num_kv_heads, rest, tp)


def _engine_qkv(name: str, roles: Sequence[Role], spec: ModelSpec, rest: tuple[int, ...], tp: int) -> Slab:
    return attention_rows(name, roles, spec.num_heads, spec.num_kv_heads, spec.head_dim, rest, tp)


def _dense(spec: ModelSpec, tp: int) -> list[Slab]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    slabs = [stacked("mlp.linear_fc1.weight", (Role.GATE, Role.UP), ffn, (hidden,), tp)]
    if spec.mlp_bias:
        slabs.append(stacked("mlp.linear_fc1.bias", (Role.GATE_BIAS, Role.UP_BIAS), ffn, (), tp))
    slabs.append(columns("mlp.linear_fc2.weight", Role.DOWN, (hidden, ffn), tp))
    if spec.mlp_bias:
        slabs.append(whole("mlp.linear_fc2.bias", Role.DOWN_BIAS, (hidden,)))
    return slabs


def _experts(spec: ModelSpec, sizes: ParallelSizes, fc1: str, fc2: str) -> list[Slab]:
    assert spec.moe is not None
    moe, hidden = spec.moe, spec.hidden_size
    slabs = [whole("mlp.router.weight", Role.ROUTER, (moe.num_experts, hidden))]
    if moe.correction_bias:
        slabs.append(whole("mlp.router.expert_bias", Role.ROUTER_BIAS, (moe.num_experts,), dtype="float32"))
    up_down = (Role.EXPERT_GATE, Role.EXPERT_UP)
    return [
        *slabs,
        stacked(fc1, up_down, moe.ffn_size, (hidden,), sizes.etp, expert=True),
        columns(fc2, Role.EXPERT_DOWN, (hidden, moe.ffn_size), sizes.etp, expert=True),
        *shared_experts(spec, sizes.tp),
    ]
