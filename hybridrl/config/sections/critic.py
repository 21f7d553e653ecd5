"""The critic of PPO, and what its values are used for."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class CriticParallelConfig:
    """Sizes of the critic's layout on the same ranks; null takes the policy's (`parallel`)."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None


@dataclass(kw_only=True)
class CriticConfig:
    """The value model of `algorithm.name=ppo`, its optimizer, and the estimator of advantages that uses it."""

    path: str | None = None
    """Hugging Face folder that its layers come from (a language model, or a reward model with its head); null: the
    policy's `model.path`. A head that the folder has not values everything at 0."""
    parallel: CriticParallelConfig = field(default_factory=CriticParallelConfig)
    """Its own layout."""
    lr: float = 1e-5
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    """Learning rate, its last value under a falling schedule, and the updates from 0 to `lr`. Everything else of the
    optimizer is the policy's (`optimizer`)."""
    clip: float | None = 0.2
    """A value may move this far from where the update found it before its gradient stops; null for no clip."""
    warmup_steps: int = 0
    """First steps of the run in which the critic learns alone and the policy stays."""
    gamma: float = 1.0
    """Discount of a later token's reward, counted in the policy's own tokens."""
    lam: float = 1.0
    """λ of generalized advantage estimation: 1 trusts the sampled returns alone, 0 the critic's next value alone."""
