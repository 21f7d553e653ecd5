"""The whole configuration: one dataclass a concern, a docstring under each field.

Types are strict (see `hybridrl.config.load`): text is no number, None only where a field says `| None`, unknown keys
are errors. Impossible combinations are found by `hybridrl.config.validate`.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "???"
    """A Hugging Face folder (config, safetensors, tokenizer), or `builtin:tiny_moe`, which is made on first use."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None takes it from `path`."""
    dtype: str = "float32"
    """Parameters and computation: `float32` or `bfloat16` (master weights are float32 then)."""
    recompute: str = "none"
    """Activation recomputation: `none`, `selective` or `full`."""
    aux_loss_coef: float = 0.0
    """Coefficient of the router's load-balancing loss in training."""
    parameter_layout: str = "engine"
    """Whose order parameters are trained in: `engine` (stacked experts, [q; k; v] on each rank, the engine's padding of
    the vocabulary), so that the engine can share their storage, or `megatron`."""
    vocab_multiple: int = 128
    """With `parameter_layout=megatron` the training vocabulary is padded to a multiple of this times TP. Padding is
    masked and never exported."""


@dataclass(kw_only=True)
class ParallelConfig:
    """Sizes of the training world: world = TP·CP·PP·DP = ETP·EP·PP·EDP."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks a pipeline stage (interleaved schedule); 1 for none."""
    ep: int = 1
    etp: int = 1
    """Tensor parallelism within an expert."""
    first_stage_layers: int | None = None
    """Layers on the first pipeline stage; None spreads them evenly."""
    last_stage_layers: int | None = None
    """Layers on the last pipeline stage; None spreads them evenly."""
    sequence_parallel: bool | None = None
    """Sequence parallelism; None turns it on where TP > 1."""


@dataclass(kw_only=True)
class SGLangConfig:
    """The SGLang engine (`rollout.engine=sglang`)."""

    hosting: str = "in_process"
    """`in_process`: each rank hosts its rank of a replica; `subprocess`: SGLang's own processes, one set a replica."""
    max_running_requests: int = 64
    """Sequences that a replica decodes together."""
    kv_tokens: int | None = None
    """Tokens of a replica's KV cache; None: what `max_running_requests` of the longest requests need."""
    routed_experts: bool = False
    """Return the experts that each token was routed to."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by its own names."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Generation."""

    engine: str = "transformers"
    """`transformers` (embedded, any machine) or `sglang`."""
    tp: int = 1
    dp: int = 1
    """Attention data parallelism inside a replica, as SGLang's `dp_size`."""
    ep: int = 1
    n: int = 8
    """Samples a prompt (the group size)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    max_prompt_length: int = 512
    """Tokens; see `data.overlong`."""
    max_response_length: int = 512
    """Tokens; a response cut there is marked truncated."""
    max_batch_size: int = 64
    """Sequences that the embedded engine decodes together."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further ids that end a response, beside the model's EOS ids."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


@dataclass(kw_only=True)
class ReshardConfig:
    """How trained weights get into the engine."""

    bucket_bytes: int = 256 * 2**20
    """At most twice this many bytes are staged on a rank while weights are exchanged."""
    placement: str = "identity"
    """Which ranks the engine's replicas are made of: `identity` (0, 1, 2, …), or `auto`, those that leave most bytes in
    place."""
    verify: bool = False
    """Compare checksums of sent and received weights after each sync."""


@dataclass(kw_only=True)
class DataConfig:
    """Prompts, or demonstrations for supervised training."""

    source: str = "jsonl"
    """`jsonl`, `parquet`, `dataset` (a Hugging Face data set on disk) or `reasoning_gym`."""
    path: str | None = None
    """File, folder or glob; `builtin:tiny_sums` is made on first use."""
    split: str | None = None
    """Split of a `dataset`."""
    prompt_key: str = "prompt"
    """Field with the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Field with the reference answer; every other field reaches the judges as metadata."""
    system_prompt: str | None = None
    chat_template: bool = True
    """Render prompts by the tokenizer's chat template; False tokenises the text as it is."""
    overlong: str = "drop"
    """Prompts over `rollout.max_prompt_length`: `drop` (and count) or `error`."""
    shuffle: bool = True
    seed: int = 0
    task: str | None = None
    """Name of the reasoning-gym data set."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reasoning-gym data set."""
    size: int = 1000
    """Number of reasoning-gym problems."""


@dataclass(kw_only=True)
class JudgeConfig:
    """One judge and its weight in the sum of rewards."""

    name: str = "???"
    """`exact`, `numeric`, `math`, `reasoning_gym`, or `module:function` of your own."""
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RewardsConfig:
    """Judging responses."""

    judges: list[JudgeConfig] = field(default_factory=list)
    pool: str = "process"
    """`process`: worker processes on each node."""
    workers: int = 2
    """Worker processes a rank."""
    timeout_s: float = 10.0
    """A judge that takes longer on a sample is killed."""
    batch_timeout_s: float = 120.0
    """All samples of a step still unjudged after this many seconds are failed."""
    memory_mb: int = 2048
    """Address space that a worker may add to its own."""
    on_error: str = "default"
    """A failed sample: gets `default`, or `mask`: is left out of the update."""
    default: float = 0.0


@dataclass(kw_only=True)
class KlConfig:
    """Divergence from the reference model (the policy before its first rollout)."""

    where: str = "none"
    """`none` (no reference model is built), `loss` or `reward`."""
    coef: float = 0.001
    estimator: str = "k3"
    """`k1`, `k2` or `k3` (Schulman, Approximating KL divergence)."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How samples become a loss."""

    name: str = "grpo"
    """`grpo` or `sft`."""
    advantage: str = "grpo"
    """A registered advantage estimator."""
    normalize: str = "sample_std"
    """Of a group's advantages: `sample_std`, `population_std` or `none`."""
    policy_loss: str = "ppo_clip"
    """A registered policy loss."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages; None for none."""
    aggregate: str = "token_mean"
    """`token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum` or `seq_mean_token_sum_norm`."""
    aggregate_length: int | None = None
    """L of `seq_mean_token_sum_norm` (Dr. GRPO); None takes `rollout.max_response_length`."""
    entropy_coef: float = 0.0
    kl: KlConfig = field(default_factory=KlConfig)


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: str = "adam"
    """`adam` (AdamW) or `sgd`."""
    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, to `min_lr` at the last update."""
    warmup_steps: int = 0
    """Updates, of which a step may have several (`trainer.mini_batch_prompts`), from 0 to `lr`."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    """Of `sgd`."""
    clip_grad: float = 1.0
    """Bound of the global gradient norm; 0 for none."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron's distributed optimizer); `sgd` needs False."""


@dataclass(kw_only=True)
class WarmStartConfig:
    """Supervised steps on the data's own answers before the first rollout, through the same actor."""

    steps: int = 0
    batch_size: int = 64
    """Examples a step."""
    lr: float = 1e-3


@dataclass(kw_only=True)
class TrainerConfig:
    """The loop and its batches."""

    nodes: int = 1
    ranks_per_node: int = 1
    """The stated hardware; the world that torchrun starts must equal nodes · ranks_per_node."""
    steps: int = 100
    prompts_per_step: int = 32
    """Prompts a rollout; samples = prompts · rollout.n."""
    mini_batch_prompts: int | None = None
    """Prompts an optimizer update; None takes all of a step in one update."""
    max_tokens_per_micro_batch: int = 4096
    """Token budget of a micro-batch on one data-parallel rank, padding included."""
    micro_batch_size: int | None = None
    """Samples a micro-batch; None lets the token budget alone decide."""
    packing: bool = True
    """Put the samples of a micro-batch end to end, without padding between them."""
    seed: int = 0
    output_dir: str = "outputs/${trainer.name}"
    name: str = "run"
    max_nonfinite_steps: int = 3
    """Updates with a non-finite gradient in a row before the run ends."""
    max_mismatch: float | None = None
    """Mean |log-prob difference| of trainer and engine above which the run ends; None only reports it."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    export_final: bool = True
    """Write the last weights as a Hugging Face folder into the run folder."""
    export_dtype: str = "source"
    """Of the written weights: `source`, as in the files that the model came from; `parameters`, as they are trained;
    `float32` or `bfloat16`."""
    logprob_chunk: int = 1024
    """Token rows of logits that are turned to log-probs at a time."""


@dataclass(kw_only=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
