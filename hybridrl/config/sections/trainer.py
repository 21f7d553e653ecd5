"""The loop and its batches."""

from dataclasses import dataclass


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
    update_epochs: int = 1
    """Passes over a step's samples; each after the first takes the prompts in an order of its own."""
    max_tokens_per_micro_batch: int = 4096
    """Token budget of a micro-batch on one rank, padding included; parallel.cp ranks share one of cp times as many."""
    micro_batch_size: int | None = None
    """Samples a micro-batch; None lets the token budget alone decide."""
    packing: bool = True
    """Put the samples of a micro-batch end to end, without padding between them."""
    seed: int = 0
    """Of all that the run draws, but for the order of the data (`data.seed`)."""
    output_dir: str = "outputs/${trainer.name}"
    """The run folder."""
    name: str = "run"
    max_nonfinite_steps: int = 3
    """Updates with a non-finite gradient in a row before the run ends."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    wandb_project: str | None = None
    """Project on Weights & Biases that gets the metrics, too (`pip install wandb`, `wandb login`); None for none."""
    export_final: bool = True
    """Write the last weights as a Hugging Face folder into the run folder."""
    export_dtype: str = "source"
    """Of the written weights: `source`, as in the files that the model came from; `parameters`, as they are trained;
    `float32` or `bfloat16`."""
    logprob_chunk: int = 1024
    """Token rows of logits that are turned to log-probs at a time."""
    resume: str = "auto"
    """`auto` goes on from the newest whole checkpoint in the run folder, if there is one; `none` starts anew and sets
    an earlier run's folder aside; anything else is the path of a checkpoint, or of a folder of them."""
    stall_timeout_s: float | None = 3600.0
    """A phase that makes no progress for so many seconds ends the run and names the rank; None waits for ever."""
    rollout_records: int = 16
    """Samples of a step that are written to `rollouts/`; 0 for none."""
