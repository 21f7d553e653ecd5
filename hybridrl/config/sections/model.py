"""The model and the training world."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "???"
    """A Hugging Face folder (config, safetensors, tokenizer), or one that is made on first use: `builtin:tiny_moe`,
    `builtin:tiny_deepseek`, `builtin:tiny_glm4`."""
    facts: str | None = None
    """A name in `conf/model`, whose sizes the dry run takes where `path` is not here; training refuses a `path` that is
    another model."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None takes it from `path`."""
    dtype: str = "float32"
    """Parameters and computation: `float32` or `bfloat16` (master weights are float32 then)."""
    recompute: str = "none"
    """Activation recomputation: `none`, `selective` or `full`."""
    aux_loss_coef: float = 0.0
    """Coefficient of the router's load-balancing loss in training."""
    router_bias_rate: float = 0.0
    """How far each update moves the router's correction bias of an expert towards an even load of the batch; 0 leaves
    the biases as they were loaded."""
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
