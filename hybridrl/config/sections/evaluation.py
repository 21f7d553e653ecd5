"""Prompts that are not trained, on which the policy is measured."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class EvaluationConfig:
    """Evaluation during a run that samples: other prompts, the same judges. Metrics are `eval/…`, of the weights after
    the step; `checkpoint.best_metric=eval/reward/mean` keeps the best."""

    every: int | None = None
    """Steps between evaluations, after the last step in any case; None for none."""
    path: str | None = None
    """File, folder or glob, read as `data` says; null with reasoning-gym, whose problems are then those of the seed
    `data.seed` + 1."""
    split: str | None = None
    """Split of a `dataset`."""
    size: int | None = None
    """The first so many rows, or of reasoning-gym so many problems; None: all, or `data.size`."""
    n: int = 1
    """Samples a prompt."""
    temperature: float = 0.0
    """Of sampling; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest that make up so much of the distribution."""
