"""What is saved of a run, when, and how much of it is kept."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved of a run, when, and how much of it is kept. How a run goes on from it: `trainer.resume`."""

    every: int | None = None
    """Steps between checkpoints, the last step's among them; None saves only when the run is told to end (SIGTERM)."""
    dir: str | None = None
    """None: `checkpoints/` in the run folder."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of every so many steps are kept for good."""
    best_metric: str | None = None
    """The checkpoint whose step was the best by this metric is kept, too."""
    best_mode: str = "max"
    """Whether `max` or `min` of the metric is the best."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory, while training goes on."""
    retries: int = 3
    """Further attempts to write after an error of the file system (a full disk)."""
    retry_wait_s: float = 10.0
    """Seconds between attempts."""
    grace_s: float = 25.0
    """After SIGTERM or Ctrl-C: seconds to the end of the step and the checkpoint; the process ends then in any case.
    torchrun kills its ranks after 30."""
    load: str = "all"
    """Of the checkpoint that `trainer.resume` names: `all`, or `weights` alone, for a new run that starts from them."""
    hf_every: int | None = None
    """Steps between exports of a Hugging Face folder (`hf-<step>` beside the checkpoints); None for none."""
