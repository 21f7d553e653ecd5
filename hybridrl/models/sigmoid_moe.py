"""What DeepSeek-V3 and GLM-4.5 have in common: sigmoid routing with a correction bias, first layers without experts,
shared experts, and layers that predict a further token (MTP) after the main ones."""

from collections.abc import Iterator, Mapping

from hybridrl.models import names
from hybridrl.models.names import MLP_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.models.weights import Role, Tensor

MOE_NAMES: Mapping[Role, str] = {
    **MLP_NAMES,
    Role.ROUTER: "model.layers.{layer}.mlp.gate.weight",
    Role.ROUTER_BIAS: "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    Role.EXPERT_GATE: "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    Role.EXPERT_UP: "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    Role.EXPERT_DOWN: "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    Role.SHARED_GATE: "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    Role.SHARED_UP: "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    Role.SHARED_DOWN: "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
    Role.MTP_EMBED: "model.layers.{layer}.embed_tokens.weight",
    Role.MTP_EMBED_NORM: "model.layers.{layer}.enorm.weight",
    Role.MTP_HIDDEN_NORM: "model.layers.{layer}.hnorm.weight",
    Role.MTP_PROJ: "model.layers.{layer}.eh_proj.weight",
    Role.MTP_HEAD_NORM: "model.layers.{layer}.shared_head.norm.weight",
    Role.MTP_HEAD: "model.layers.{layer}.shared_head.head.weight",
}


def read_moe(
    settings: Settings, num_layers: int, *, groups: int, topk_groups: int, dense: int, scale: float
) -> MoeSpec:
    """The experts that the configuration describes; problems are left in `settings`.

    The keywords are the family's defaults of `n_group`, `topk_group`, `first_k_dense_replace` and
    `routed_scaling_factor`.
    """
    settings.only("scoring_func", "sigmoid", default="sigmoid")
    settings.only("topk_method", "noaux_tc", default="noaux_tc")
    settings.only("moe_layer_freq", 1, default=1)
    experts, top_k = settings.integer("n_routed_experts"), settings.integer("num_experts_per_tok")
    if top_k > experts:
        settings.note("num_experts_per_tok", top_k, f"at most n_routed_experts={experts}")
    groups, chosen = settings.integer("n_group", default=groups), settings.integer("topk_group", default=topk_groups)
    if experts % groups or chosen > groups:
        settings.note("n_group", groups, f"a divisor of n_routed_experts={experts}, at least topk_group={chosen}")
    dense = settings.integer("first_k_dense_replace", default=dense, least=0)
    size, shared = settings.integer("moe_intermediate_size"), settings.integer("n_shared_experts", default=1, least=0)
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        ffn_size=size,
        norm_topk_prob=settings.flag("norm_topk_prob", True),
        layers=tuple(layer >= dense for layer in range(num_layers)),
        score_function="sigmoid",
        correction_bias=True,
        shared_ffn_size=shared * size,
        num_shared_experts=shared,
        num_groups=groups,
        topk_groups=chosen,
        routed_scaling_factor=settings.number("routed_scaling_factor", scale),
    )


def tensors_with_prediction(spec: ModelSpec, templates: Mapping[Role, str]) -> Iterator[Tensor]:
    """All tensors of the decoder, and those of its `spec.mtp_layers` prediction layers, which follow the main ones.

    A prediction layer is a decoder layer with experts, two norms and a projection before it, and its own names for the
    embedding, the final norm and the head. (`dataclasses.replace(spec, mtp_layers=0)` leaves them out.)
    """
    yield from names.tensors(spec, templates)
    hidden = spec.hidden_size
    shapes: dict[Role, tuple[int, ...]] = {
        Role.MTP_EMBED: (spec.vocab_size, hidden),
        Role.MTP_EMBED_NORM: (hidden,),
        Role.MTP_HIDDEN_NORM: (hidden,),
        Role.MTP_PROJ: (hidden, 2 * hidden),
        **names.layer_shapes(spec, moe=spec.moe is not None),
        Role.MTP_HEAD_NORM: (hidden,),
        Role.MTP_HEAD: (spec.vocab_size, hidden),
    }
    for layer in range(spec.num_layers, spec.num_layers + spec.mtp_layers):
        yield from names.layer_tensors(spec, templates, layer, shapes)
