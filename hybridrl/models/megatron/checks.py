"""What Megatron-core cannot compute, or would compute wrongly without saying so."""

from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.models.megatron.routing import GROUP_MEMBERS
from hybridrl.models.spec import ModelSpec, MoeSpec

FAMILIES = ("deepseek_v3", "glm4_moe", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose Megatron form is tested against transformers."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16")
RECOMPUTE = ("none", "selective", "full")


def problems(spec: ModelSpec, config: Config) -> list[str]:
    """Every reason why this model cannot be trained so: the setting, what was found, what is supported."""
    return [*_model_problems(spec), *_config_problems(config), *_parallel_problems(spec, config)]


def _model_problems(spec: ModelSpec) -> Iterator[str]:
    if spec.family not in FAMILIES:
        yield f"model_type={spec.family!r}; supported in training: {', '.join(FAMILIES)}"
    if spec.mtp_layers:
        yield f"mtp_layers={spec.mtp_layers}; supported in training: 0"
    kind = (spec.rope_scaling or {}).get("rope_type", "default")
    if kind not in ROPE_TYPES:
        yield f"rope_type={kind!r}; supported in training: {' or '.join(map(repr, ROPE_TYPES))}"
    if spec.mla is not None and (spec.qkv_bias or spec.output_bias or spec.qk_norm):
        yield (
            f"latent attention with qkv_bias={spec.qkv_bias}, output_bias={spec.output_bias}, qk_norm={spec.qk_norm}; "
            "supported in training: none of them"
        )
    if spec.moe is not None:
        yield from _expert_problems(spec.moe)


def _expert_problems(moe: MoeSpec) -> Iterator[str]:
    if moe.top_k == 1 and moe.norm_topk_prob:
        yield (
            "num_experts_per_tok=1 with norm_topk_prob=true: the one weight is always 1 and the router learns nothing; "
            "supported: at least 2 experts a token, or norm_topk_prob=false"
        )
    if moe.score_function != "sigmoid" and (moe.correction_bias or moe.num_groups > 1):
        yield (
            f"router score {moe.score_function!r} with correction_bias={moe.correction_bias} and n_group="
            f"{moe.num_groups}; supported in training: a bias and groups with 'sigmoid' alone"
        )
    size = moe.num_experts // moe.num_groups
    if moe.num_groups > 1 and (size < GROUP_MEMBERS or size * moe.topk_groups < moe.top_k):
        yield (
            f"n_group={moe.num_groups}, topk_group={moe.topk_groups} of {moe.num_experts} experts: groups of {size}; "
            f"supported: groups of {GROUP_MEMBERS} at least, and num_experts_per_tok={moe.top_k} experts in the chosen"
        )


def _config_problems(config: Config) -> Iterator[str]:
    if config.model.dtype not in DTYPES:
        yield f"model.dtype={config.model.dtype!r}; supported: {', '.join(DTYPES)}"
    if config.model.recompute not in RECOMPUTE:
        yield f"model.recompute={config.model.recompute!r}; supported: {', '.join(RECOMPUTE)}"


def _parallel_problems(spec: ModelSpec, config: Config) -> Iterator[str]:
    parallel = config.parallel
    sequence_parallel = uses_sequence_parallel(config)
    if spec.num_heads % parallel.tp:
        yield f"parallel.tp={parallel.tp} does not divide num_attention_heads={spec.num_heads}"
    if spec.mla is None and spec.num_kv_heads % parallel.tp and parallel.tp % spec.num_kv_heads:
        yield (
            f"parallel.tp={parallel.tp}, num_key_value_heads={spec.num_kv_heads}: one must be a multiple of the other"
        )
    if sequence_parallel and parallel.tp == 1:
        yield "parallel.sequence_parallel=true with parallel.tp=1; supported: TP of at least 2"
    if (spec.moe is None or not all(spec.moe.layers)) and spec.ffn_size % parallel.tp:
        yield f"parallel.tp={parallel.tp} does not divide intermediate_size={spec.ffn_size}"
    if spec.moe is None:
        if parallel.ep > 1:
            yield f"parallel.ep={parallel.ep} for a model without experts; supported: 1"
        return
    if spec.moe.num_experts % parallel.ep:
        yield f"parallel.ep={parallel.ep} does not divide num_experts={spec.moe.num_experts}"
    if spec.moe.shared_ffn_size % parallel.tp:
        yield f"parallel.tp={parallel.tp} does not divide the shared experts' size of {spec.moe.shared_ffn_size}"
    if spec.moe.ffn_size % parallel.etp:
        yield f"parallel.etp={parallel.etp} does not divide the experts' intermediate_size={spec.moe.ffn_size}"
    if parallel.tp > 1 and not sequence_parallel:
        yield f"parallel.tp={parallel.tp} with experts; supported: with parallel.sequence_parallel=true"
    if config.model.parameter_layout == "megatron" and parallel.ep == 1 and parallel.etp != parallel.tp:
        yield (
            f"parallel.etp={parallel.etp}, parallel.tp={parallel.tp}, parallel.ep=1: Megatron never sums the gradients "
            "of the experts' copies there, and training would be silently wrong; supported: etp equal to tp, ep > 1, "
            "or model.parameter_layout=engine"
        )


def uses_sequence_parallel(config: Config) -> bool:
    """The setting, or where it is None whether TP > 1."""
    setting = config.parallel.sequence_parallel
    return config.parallel.tp > 1 if setting is None else setting
