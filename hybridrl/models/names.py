"""From a model's sizes and its names to its tensors: the part of a weight map that all families share.

Checkpoint names differ between families, shapes do not. A family gives a template of a name for each role; `{layer}`
and `{expert}` stand for global indices.
"""

from collections.abc import Iterator, Mapping

from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import EXPERT_ROLES, Role, Tensor

ATTENTION_NAMES: Mapping[Role, str] = {
    Role.EMBED: "model.embed_tokens.weight",
    Role.INPUT_NORM: "model.layers.{layer}.input_layernorm.weight",
    Role.Q: "model.layers.{layer}.self_attn.q_proj.weight",
    Role.Q_BIAS: "model.layers.{layer}.self_attn.q_proj.bias",
    Role.K: "model.layers.{layer}.self_attn.k_proj.weight",
    Role.K_BIAS: "model.layers.{layer}.self_attn.k_proj.bias",
    Role.V: "model.layers.{layer}.self_attn.v_proj.weight",
    Role.V_BIAS: "model.layers.{layer}.self_attn.v_proj.bias",
    Role.O: "model.layers.{layer}.self_attn.o_proj.weight",
    Role.O_BIAS: "model.layers.{layer}.self_attn.o_proj.bias",
    Role.Q_NORM: "model.layers.{layer}.self_attn.q_norm.weight",
    Role.K_NORM: "model.layers.{layer}.self_attn.k_norm.weight",
    Role.POST_ATTENTION_NORM: "model.layers.{layer}.post_attention_layernorm.weight",
    Role.FINAL_NORM: "model.norm.weight",
    Role.LM_HEAD: "lm_head.weight",
    Role.SCORE: "score.weight",
}
"""The names that Llama gave and its descendants kept."""

MLP_NAMES: Mapping[Role, str] = {
    Role.GATE: "model.layers.{layer}.mlp.gate_proj.weight",
    Role.GATE_BIAS: "model.layers.{layer}.mlp.gate_proj.bias",
    Role.UP: "model.layers.{layer}.mlp.up_proj.weight",
    Role.UP_BIAS: "model.layers.{layer}.mlp.up_proj.bias",
    Role.DOWN: "model.layers.{layer}.mlp.down_proj.weight",
    Role.DOWN_BIAS: "model.layers.{layer}.mlp.down_proj.bias",
}


def tensors(spec: ModelSpec, names: Mapping[Role, str]) -> Iterator[Tensor]:
    """All tensors of a decoder in layer order: embedding, layers, final norm, head.

    A tied head is absent, a scalar one has one row.

    Multi-token-prediction layers are not among them. Raises KeyError where `names` lacks a role that the model has.
    """
    vocabulary = (spec.vocab_size, spec.hidden_size)
    yield _tensor(spec, names, Role.EMBED, vocabulary)
    kinds = {moe: layer_shapes(spec, moe=moe) for moe in {spec.is_moe_layer(i) for i in range(spec.num_layers)}}
    for layer in range(spec.num_layers):
        yield from layer_tensors(spec, names, layer, kinds[spec.is_moe_layer(layer)])
    yield _tensor(spec, names, Role.FINAL_NORM, (spec.hidden_size,))
    if spec.scalar_head:
        yield _tensor(spec, names, Role.SCORE, (1, spec.hidden_size))
    elif not spec.tied:
        yield _tensor(spec, names, Role.LM_HEAD, vocabulary)


def layer_tensors(
    spec: ModelSpec, names: Mapping[Role, str], layer: int, shapes: Mapping[Role, tuple[int, ...]]
) -> Iterator[Tensor]:
    """The tensors of one layer with these shapes by role, experts one after another."""
    experts = {role: shape for role, shape in shapes.items() if role in EXPERT_ROLES}
    for role, shape in shapes.items():
        if role not in EXPERT_ROLES:
            yield _tensor(spec, names, role, shape, layer)
        elif role == next(iter(experts)):
            assert spec.moe is not None
            for expert in range(spec.moe.num_experts):
                for one, size in experts.items():
                    yield _tensor(spec, names, one, size, layer, expert)


def _tensor(
    spec: ModelSpec,
    names: Mapping[Role, str],
    role: Role,
    shape: tuple[int, ...],
    layer: int | None = None,
    expert: int | None = None,
) -> Tensor:
    name = names[role].format(layer=layer, expert=expert)
    return Tensor(name, shape, spec.dtypes.get(role, spec.dtype), role, layer, expert)


def layer_shapes(spec: ModelSpec, *, moe: bool) -> dict[Role, tuple[int, ...]]:
    """Shape of each role of a layer, in order; those of an expert are one expert's."""
    hidden = spec.hidden_size
    shapes: dict[Role, tuple[int, ...]] = {Role.INPUT_NORM: (hidden,)}
    shapes |= _attention_shapes(spec) if spec.mla is None else _latent_attention_shapes(spec)
    shapes[Role.POST_ATTENTION_NORM] = (hidden,)
    return shapes | (_moe_shapes(spec) if moe else _dense_shapes(spec))


def _attention_shapes(spec: ModelSpec) -> dict[Role, tuple[int, ...]]:
    hidden = spec.hidden_size
    rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[Role, tuple[int, ...]] = {Role.Q: (rows, hidden), Role.K: (kv_rows, hidden), Role.V: (kv_rows, hidden)}
    if spec.qkv_bias:
        shapes |= {Role.Q_BIAS: (rows,), Role.K_BIAS: (kv_rows,), Role.V_BIAS: (kv_rows,)}
    shapes[Role.O] = (hidden, rows)
    if spec.output_bias:
        shapes[Role.O_BIAS] = (hidden,)
    if spec.qk_norm:
        shapes |= {Role.Q_NORM: (spec.head_dim,), Role.K_NORM: (spec.head_dim,)}
    return shapes


def _latent_attention_shapes(spec: ModelSpec) -> dict[Role, tuple[int, ...]]:
    assert spec.mla is not None
    mla, hidden, heads = spec.mla, spec.hidden_size, spec.num_heads
    rows = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    shapes: dict[Role, tuple[int, ...]]
    if mla.q_lora_rank is None:
        shapes = {Role.Q: (rows, hidden)}
    else:
        rank = mla.q_lora_rank
        shapes = {Role.Q_A: (rank, hidden), Role.Q_A_NORM: (rank,), Role.Q_B: (rows, rank)}
    return shapes | {
        Role.KV_A: (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        Role.KV_A_NORM: (mla.kv_lora_rank,),
        Role.KV_B: (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        Role.O: (hidden, heads * mla.v_head_dim),
    }


def _dense_shapes(spec: ModelSpec) -> dict[Role, tuple[int, ...]]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    shapes: dict[Role, tuple[int, ...]] = {Role.GATE: (ffn, hidden), Role.UP: (ffn, hidden), Role.DOWN: (hidden, ffn)}
    if spec.mlp_bias:
        shapes |= {Role.GATE_BIAS: (ffn,), Role.UP_BIAS: (ffn,), Role.DOWN_BIAS: (hidden,)}
    return shapes


def _moe_shapes(spec: ModelSpec) -> dict[Role, tuple[int, ...]]:
    assert spec.moe is not None
    moe, hidden = spec.moe, spec.hidden_size
    shapes: dict[Role, tuple[int, ...]] = {Role.ROUTER: (moe.num_experts, hidden)}
    if moe.correction_bias:
        shapes[Role.ROUTER_BIAS] = (moe.num_experts,)
    up, down = (moe.ffn_size, hidden), (hidden, moe.ffn_size)
    shapes |= {Role.EXPERT_GATE: up, Role.EXPERT_UP: up, Role.EXPERT_DOWN: down}
    if moe.shared_ffn_size:
        up, down = (moe.shared_ffn_size, hidden), (hidden, moe.shared_ffn_size)
        shapes |= {Role.SHARED_GATE: up, Role.SHARED_UP: up, Role.SHARED_DOWN: down}
    return shapes
