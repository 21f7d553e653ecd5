"""How samples become a loss."""

from dataclasses import dataclass, field


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
    """What is learnt from: the policy's own samples by `grpo` (advantages without a critic), `ppo` (with one) or
    `distill` (a teacher's log-probs); data alone by `sft`, `preference` or `reward_model`."""
    advantage: str = "grpo"
    """A registered advantage estimator; `gae` for `ppo`, `reverse_kl` for `distill`."""
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
