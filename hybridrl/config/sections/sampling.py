"""Which groups of samples a step trains on."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    """Groups whose rewards are all alike teach nothing; here they are dropped and made up by further ones (DAPO)."""

    enabled: bool = False
    max_generation_batches: int = 10
    """Batches of prompts a step before the run ends; 0 for no limit."""
    generation_prompts: int | None = None
    """Prompts a batch; None takes `trainer.prompts_per_step`."""
    judge: str | None = None
    """Whose scores decide (`rewards.judges`, by name); None: the weighted sum of all. Never the shaped reward."""
    tolerance: float = 1e-6
    """Rewards that differ by no more are alike."""
    surplus: str = "drop"
    """Groups with a signal that a step has no room for: `drop`, or `keep` for the next step."""
