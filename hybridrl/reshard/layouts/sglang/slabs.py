"""The engine's parameters before they are cut, for each family that it serves: what `SGLangLayout` places."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hybridrl.models.spec import MlaSpec, ModelSpec, MoeSpec
from hybridrl.models.vocabulary import padded_as_engine
from hybridrl.models.weights import Role
from hybridrl.reshard.layouts.sglang.sizes import RolloutSizes
from hybridrl.reshard.layouts.slabs import Segment, Slab, attention_rows, columns, rows, stacked, whole


class Axis(Enum):
    """What a parameter is cut over: a rank of the replica holds the shard of its index on this axis."""

    WHOLE = "whole"
    TP = "tp"
    ATTENTION = "attention"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter and what it is cut over. Experts lie in a stack: one slab for each of `stack` local experts."""

    slab: Slab
    axis: Axis
    stack: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on one rank."""
        return (self.stack, *self.slab.shape) if self.stack else self.slab.shape


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the engine's class for a family does differently."""

    attention_dp: bool
    """Attention may be data parallel."""
    shares_head: bool
    """A tied head is the embedding's storage; else it is a parameter of its own, fed from the same tensor."""
    moe: str = "mlp"
    """Module of the experts within a layer."""
    heeds_dense_tp: bool = False
    """`moe_dense_tp` and `whole_shared_experts` have an effect."""
    dense_layers: bool = True
    """Layers without experts may stand among those with."""
    router_dtype: str | None = None


ENGINES = {
    "qwen3_moe": Engine(attention_dp=True, shares_head=False, dense_layers=False),
    "mixtral": Engine(attention_dp=False, shares_head=False, moe="block_sparse_moe", dense_layers=False),
    "qwen3": Engine(attention_dp=True, shares_head=True),
    "qwen2": Engine(attention_dp=False, shares_head=True),
    "llama": Engine(attention_dp=False, shares_head=True),
    "deepseek_v3": Engine(attention_dp=True, shares_head=True, heeds_dense_tp=True),
    "glm4_moe": Engine(attention_dp=True, shares_head=False, heeds_dense_tp=True, router_dtype="float32"),
}


def problems(spec: ModelSpec, sizes: RolloutSizes, fused_shared: int) -> list[str]:
    """Every reason why the engine cannot hold the model at these sizes, each with its numbers."""
    if spec.family not in ENGINES:
        return [f"{spec.family} is none of the engine's families {', '.join(ENGINES)}"]
    engine, over = ENGINES[spec.family], sizes.attention_tp
    found = []
    if sizes.dp > 1 and not engine.attention_dp:
        found.append(f"rollout.dp={sizes.dp}: the engine's {spec.family} has no data-parallel attention")
    if spec.num_heads % over:
        found.append(f"num_attention_heads={spec.num_heads} is not a multiple of tp/dp={over}")
    if spec.mla is None and spec.num_kv_heads % over and over % spec.num_kv_heads:
        found.append(f"num_key_value_heads={spec.num_kv_heads} and tp/dp={over}: neither is a multiple of the other")
    if spec.mlp_bias:
        found.append(f"the engine's {spec.family} has no biases in its MLP")
    if spec.output_bias and spec.family not in ("qwen3", "qwen3_moe", "llama"):
        found.append(f"the engine's {spec.family} has no bias on the output projection")
    dense = [layer for layer in range(spec.num_layers) if not spec.is_moe_layer(layer)]
    if dense and spec.ffn_size % _dense_tp(engine, sizes):
        found.append(f"intermediate_size={spec.ffn_size} is not a multiple of {_dense_tp(engine, sizes)} ranks")
    if spec.moe is None:
        return found + [f"rollout.{k}={v} for a model without experts" for k, v in _expert_sizes(sizes) if v > 1]
    if dense and not engine.dense_layers:
        found.append(f"layers {dense[:8]} have no experts, and the engine's {spec.family} builds experts in all layers")
    return found + _expert_problems(spec.moe, sizes, fused_shared)


def _expert_sizes(sizes: RolloutSizes) -> tuple[tuple[str, int], ...]:
    return ("ep", sizes.ep), ("moe_dp", sizes.moe_dp)


def _expert_problems(moe: MoeSpec, sizes: RolloutSizes, fused_shared: int) -> list[str]:
    found = []
    if moe.num_experts % sizes.ep:
        found.append(f"num_experts={moe.num_experts} is not a multiple of rollout.ep={sizes.ep}")
    if moe.ffn_size % sizes.moe_tp:
        found.append(f"the experts' intermediate size {moe.ffn_size} is not a multiple of tp/ep/moe_dp={sizes.moe_tp}")
    over = 1 if sizes.whole_shared_experts else sizes.tp
    if moe.shared_ffn_size % over and not fused_shared:
        found.append(f"the shared experts' intermediate size {moe.shared_ffn_size} is not a multiple of tp={over}")
    if fused_shared and (fused_shared, moe.num_shared_experts) != (1, 1):
        found.append(f"num_fused_shared_experts={fused_shared}: can be 0, or 1 of 1, not of {moe.num_shared_experts}")
    return found


def embedding(spec: ModelSpec, sizes: RolloutSizes) -> Stored:
    """The embedding, cut over the attention ranks where attention is data parallel."""
    axis = Axis.ATTENTION if sizes.dp > 1 else Axis.TP
    return _vocabulary("model.embed_tokens.weight", Role.EMBED, spec, sizes, axis)


def head(spec: ModelSpec, sizes: RolloutSizes) -> Stored | None:
    """The head, or None where it is the embedding."""
    if spec.tied and ENGINES[spec.family].shares_head:
        return None
    axis = Axis.ATTENTION if sizes.dp_lm_head else Axis.TP
    return _vocabulary("lm_head.weight", Role.EMBED if spec.tied else Role.LM_HEAD, spec, sizes, axis)


def _vocabulary(name: str, role: Role, spec: ModelSpec, sizes: RolloutSizes, axis: Axis) -> Stored:
    shards = sizes.attention_tp if axis is Axis.ATTENTION else sizes.tp
    padded = padded_as_engine(spec.vocab_size, shards)
    return Stored(rows(name, role, (spec.vocab_size, spec.hidden_size), shards, padded=padded), axis)


def layer(spec: ModelSpec, sizes: RolloutSizes, *, moe: bool, fused_shared: int) -> list[Stored]:
    """Parameters of a layer, named from the layer on."""
    hidden = (spec.hidden_size,)
    found = _attention(spec, sizes.attention_tp) if spec.mla is None else _latent(spec, spec.mla, sizes.attention_tp)
    found += _moe(spec, sizes, fused_shared) if moe else _mlp(spec, sizes)
    return [
        *found,
        Stored(whole("input_layernorm.weight", Role.INPUT_NORM, hidden), Axis.WHOLE),
        Stored(whole("post_attention_layernorm.weight", Role.POST_ATTENTION_NORM, hidden), Axis.WHOLE),
    ]


def prediction(spec: ModelSpec) -> list[Stored]:
    """What a draft model has beside its one decoder layer. It shares the main model's embedding and head."""
    hidden = (spec.hidden_size,)
    return [
        Stored(whole("enorm.weight", Role.MTP_EMBED_NORM, hidden), Axis.WHOLE),
        Stored(whole("hnorm.weight", Role.MTP_HIDDEN_NORM, hidden), Axis.WHOLE),
        Stored(whole("eh_proj.weight", Role.MTP_PROJ, (spec.hidden_size, 2 * spec.hidden_size)), Axis.WHOLE),
        Stored(whole("shared_head.norm.weight", Role.MTP_HEAD_NORM, hidden), Axis.WHOLE),
    ]


def _attention(spec: ModelSpec, tp: int) -> list[Stored]:
    size, hidden = spec.head_dim, (spec.hidden_size,)
    found = [Stored(_qkv("self_attn.qkv_proj.weight", (Role.Q, Role.K, Role.V), spec, tp, hidden), Axis.ATTENTION)]
    if spec.qkv_bias:
        biases = (Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS)
        found.append(Stored(_qkv("self_attn.qkv_proj.bias", biases, spec, tp, ()), Axis.ATTENTION))
    found.append(_output(spec, size, tp))
    if spec.output_bias:
        found.append(Stored(whole("self_attn.o_proj.bias", Role.O_BIAS, hidden), Axis.WHOLE))
    if spec.qk_norm:
        found.append(Stored(whole("self_attn.q_norm.weight", Role.Q_NORM, (size,)), Axis.WHOLE))
        found.append(Stored(whole("self_attn.k_norm.weight", Role.K_NORM, (size,)), Axis.WHOLE))
    return found


def _qkv(name: str, roles: Sequence[Role], spec: ModelSpec, tp: int, rest: tuple[int, ...]) -> Slab:
    return attention_rows(name, roles, spec.num_heads, spec.num_kv_heads, spec.head_dim, rest, tp)


def _output(spec: ModelSpec, size: int, tp: int) -> Stored:
    shape = (spec.hidden_size, spec.num_heads * size)
    return Stored(columns("self_attn.o_proj.weight", Role.O, shape, tp), Axis.ATTENTION)


def _latent(spec: ModelSpec, mla: MlaSpec, tp: int) -> list[Stored]:
    """Latent attention: the projections down are whole and, where queries have one too, fused; those up are cut."""
    hidden, head_size = spec.hidden_size, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    q_rows, kv_a_rows = spec.num_heads * head_size, mla.kv_lora_rank + mla.qk_rope_head_dim
    kv_b_rows = spec.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank is None:
        found = [
            Stored(rows("self_attn.q_proj.weight", Role.Q, (q_rows, hidden), tp), Axis.ATTENTION),
            Stored(whole("self_attn.kv_a_proj_with_mqa.weight", Role.KV_A, (kv_a_rows, hidden)), Axis.WHOLE),
        ]
    else:
        segments = (Segment(Role.Q_A, 0, mla.q_lora_rank), Segment(Role.KV_A, 0, kv_a_rows))
        fused = Slab(name="self_attn.fused_qkv_a_proj_with_mqa.weight", segments=segments, rest=(hidden,))
        found = [
            Stored(fused, Axis.WHOLE),
            Stored(whole("self_attn.q_a_layernorm.weight", Role.Q_A_NORM, (mla.q_lora_rank,)), Axis.WHOLE),
            Stored(rows("self_attn.q_b_proj.weight", Role.Q_B, (q_rows, mla.q_lora_rank), tp), Axis.ATTENTION),
        ]
    return [
        *found,
        Stored(rows("self_attn.kv_b_proj.weight", Role.KV_B, (kv_b_rows, mla.kv_lora_rank), tp), Axis.ATTENTION),
        _output(spec, mla.v_head_dim, tp),
        Stored(whole("self_attn.kv_a_layernorm.weight", Role.KV_A_NORM, (mla.kv_lora_rank,)), Axis.WHOLE),
    ]


def _dense_tp(engine: Engine, sizes: RolloutSizes) -> int:
    return 1 if engine.heeds_dense_tp and sizes.moe_dense_tp == 1 else sizes.tp


def _mlp(spec: ModelSpec, sizes: RolloutSizes) -> list[Stored]:
    tp = _dense_tp(ENGINES[spec.family], sizes)
    return _gated("mlp", (Role.GATE, Role.UP, Role.DOWN), spec.hidden_size, spec.ffn_size, tp)


def _gated(module: str, roles: tuple[Role, Role, Role], hidden: int, ffn: int, tp: int) -> list[Stored]:
    axis = Axis.TP if tp > 1 else Axis.WHOLE
    return [
        Stored(stacked(f"{module}.gate_up_proj.weight", roles[:2], ffn, (hidden,), tp), axis),
        Stored(columns(f"{module}.down_proj.weight", roles[2], (hidden, ffn), tp), axis),
    ]


def _moe(spec: ModelSpec, sizes: RolloutSizes, fused_shared: int) -> list[Stored]:
    assert spec.moe is not None
    moe, hidden, engine = spec.moe, spec.hidden_size, ENGINES[spec.family]
    gate = whole(f"{engine.moe}.gate.weight", Role.ROUTER, (moe.num_experts, hidden), engine.router_dtype)
    found = [Stored(gate, Axis.WHOLE)]
    if moe.correction_bias:
        bias = f"{engine.moe}.gate.e_score_correction_bias"
        found.append(Stored(whole(bias, Role.ROUTER_BIAS, (moe.num_experts,), "float32"), Axis.WHOLE))
    stack, tp = moe.num_experts // sizes.ep + fused_shared, sizes.moe_tp
    up = (Role.EXPERT_GATE, Role.EXPERT_UP)
    w13 = stacked(f"{engine.moe}.experts.w13_weight", up, moe.ffn_size, (hidden,), tp, expert=True)
    shape = (hidden, moe.ffn_size)
    w2 = columns(f"{engine.moe}.experts.w2_weight", Role.EXPERT_DOWN, shape, tp, expert=True)
    found += [Stored(w13, Axis.EXPERT, stack), Stored(w2, Axis.EXPERT, stack)]
    if moe.shared_ffn_size and not fused_shared:
        roles = (Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN)
        over = 1 if engine.heeds_dense_tp and sizes.whole_shared_experts else sizes.tp
        found += _gated(f"{engine.moe}.shared_experts", roles, hidden, moe.shared_ffn_size, over)
    return found


AS_EXPERT = {
    Role.SHARED_GATE: Role.EXPERT_GATE,
    Role.SHARED_UP: Role.EXPERT_UP,
    Role.SHARED_DOWN: Role.EXPERT_DOWN,
}
"""What a fused shared expert's tensors are in the stack, where it follows the local routed experts on every rank."""
