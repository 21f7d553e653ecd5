"""Judges and the workers that run them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class JudgeConfig:
    """One judge and its weight in the sum of rewards."""

    name: str = "???"
    """`exact`, `numeric`, `math`, `reasoning_gym`, `reward_model` (args: `path`, its Hugging Face
    folder), or `module:function` of your own."""
    weight: float = 1.0
    """Of its score in the sum."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the judge."""


@dataclass(kw_only=True)
class RewardsConfig:
    """Judging responses."""

    judges: list[JudgeConfig] = field(default_factory=list)
    pool: str = "process"
    """`process`: worker processes on each node; `ray`: on the Ray cluster of RAY_ADDRESS, with the same limits."""
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
    """The reward of a failed sample."""
