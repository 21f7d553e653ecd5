"""What SGLang's own classes of models cannot be: each of its families allows something else."""

from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.config.validate.model import Model

ATTENTION_DP = ("deepseek_v3", "glm4_moe", "qwen3", "qwen3_moe")
"""Families whose attention may be data parallel."""
EXPERTS_EVERYWHERE = ("mixtral", "qwen3_moe")
"""Families that have experts in all layers."""
SQUARE_HEADS = ("mixtral",)
"""Families that take the heads' size to be the hidden size over their number, whatever `head_dim` says."""
OUTPUT_BIAS = ("llama", "qwen3", "qwen3_moe")
"""Families whose output projection may have a bias."""


def served_problems(config: Config, spec: Model) -> Iterator[str]:
    """Why SGLang cannot serve this model at the rollout's sizes."""
    rollout, family = config.rollout, spec.family
    if rollout.dp > 1 and family not in ATTENTION_DP:
        yield (
            f"rollout.dp={rollout.dp}: SGLang's {family} has no data-parallel attention ({', '.join(ATTENTION_DP)} "
            "have); set rollout.dp=1 and let more replicas share the requests"
        )
    if family in SQUARE_HEADS and spec.head_dim * spec.num_heads != spec.hidden_size:
        yield (
            f"rollout.engine=sglang: SGLang's {family} heeds no head_dim, and this model has {spec.num_heads} heads of "
            f"{spec.head_dim} over a hidden size of {spec.hidden_size}; take rollout.engine=transformers"
        )
    if spec.mlp_bias:
        yield f"rollout.engine=sglang: SGLang's {family} has no biases in its MLP; take rollout.engine=transformers"
    if spec.output_bias and family not in OUTPUT_BIAS:
        yield (
            f"rollout.engine=sglang: SGLang's {family} has no bias on the output projection; take "
            "rollout.engine=transformers"
        )
    dense = spec.moe is None or not all(spec.moe.layers)
    if dense and spec.moe is not None and family in EXPERTS_EVERYWHERE:
        yield (
            f"rollout.engine=sglang: SGLang's {family} builds experts in every layer, and this model has "
            f"{sum(not moe for moe in spec.moe.layers)} without; take rollout.engine=transformers"
        )
    over = rollout.sglang.server_args.get("moe_dense_tp_size") or rollout.tp
    if dense and spec.ffn_size % over:
        yield f"rollout.tp={rollout.tp} does not divide the model's intermediate size of {spec.ffn_size}"
    if spec.moe is not None and spec.moe.shared_ffn_size % rollout.tp:
        yield (
            f"rollout.tp={rollout.tp} does not divide the shared experts' intermediate size of "
            f"{spec.moe.shared_ffn_size}"
        )
