"""The optimizer, its schedule and the warm start."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: str = "adam"
    """`adam` (AdamW) or `sgd`."""
    lr: float = 1e-6
    """Learning rate after the warm-up."""
    min_lr: float = 0.0
    """Learning rate at the last update, of a falling schedule."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, to `min_lr` at the last update."""
    warmup_steps: int = 0
    """Updates, of which a step may have several (`trainer.mini_batch_prompts`), from 0 to `lr`."""
    weight_decay: float = 0.0
    """In `adam` decoupled from the gradient (AdamW)."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    """β₁, β₂ and ε of `adam`."""
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
