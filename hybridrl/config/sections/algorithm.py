"""How samples become a loss."""

from dataclasses import dataclass, field

from hybridrl.config.sections.correction import CorrectionConfig
from hybridrl.config.sections.sampling import DynamicSamplingConfig


@dataclass(kw_only=True)
class KlConfig:
    """Divergence from the reference model (the policy before its first rollout)."""

    where: str = "none"
    """`none` (no reference model is built); `loss`; `reward`: subtracted from the reward of the response; `return`:
    from each token's advantage, the divergence of that token and all after it (REINFORCE++)."""
    coef: float = 0.001
    """Weight of the divergence."""
    estimator: str = "k3"
    """`k1`, `k2` or `k3` (Schulman, Approximating KL divergence)."""
    target: float | None = None
    """Mean divergence of a response, in nats, that `coef` is steered towards after each step (Ziegler et al. 2019);
    None keeps it constant."""
    gain: float = 0.1
    """How fast `coef` is steered: at most by a fifth of this a step."""


@dataclass(kw_only=True)
class OverlongConfig:
    """Responses near or at their limit of length (DAPO)."""

    cache: int | None = None
    """Soft punishment: the reward falls over the last `cache` tokens before `max_length`. None for none."""
    max_length: int | None = None
    """None takes `rollout.max_response_length`."""
    factor: float = 1.0
    """What a response of `max_length` tokens loses."""
    filter: bool = False
    """Leave truncated responses out of the loss. Their rewards still count in their group's statistics."""


@dataclass(kw_only=True)
class CovarianceConfig:
    """Which tokens `policy_loss=clip_cov` and `kl_cov` select, of an update's trained tokens."""

    fraction: float = 2e-4
    """Of the tokens; at least one is selected."""
    low: float = 1.0
    high: float = 5.0
    """`clip_cov` draws from tokens whose covariance is in [low, high]."""
    coef: float = 1.0
    """Of the divergence from the old policy that `kl_cov` adds to the loss of the selected tokens."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How samples become a loss."""

    name: str = "grpo"
    """What is learnt from: the policy's own samples by `grpo` (advantages without a critic), `ppo` (with one) or
    `distill` (a teacher's log-probs); data alone by `sft`, `preference` or `reward_model`."""
    advantage: str = "grpo"
    """A registered advantage estimator; `gae` for `ppo`, `reverse_kl` for `distill`."""
    normalize: str = "sample_std"
    """Of `advantage=grpo` and `gpg`: the group's `sample_std` or `population_std`, `batch_std` or `none`."""
    pass_k: int | None = None
    """k of `advantage=pass_at_k`."""
    whiten: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over the trained tokens of the step."""
    old_log_probs: str = "trainer"
    """The ratio's denominator: `trainer` computes the log-probs of the samples again; `engine` takes the engine's, and
    saves that pass."""
    routing_replay: str = "none"
    """Experts in the trainer's passes over samples: `none`, each pass chooses anew; `r2`, updates take those of the
    pass that computed the old log-probs; `r3`, all passes take the engine's (`rollout.routed_experts`)."""
    policy_loss: str = "ppo_clip"
    """A registered policy loss."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages; None for none."""
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    """Of `clip_cov` and `kl_cov`."""
    aggregate: str = "token_mean"
    """`token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum` or `seq_mean_token_sum_norm`."""
    aggregate_length: int | None = None
    """L of `seq_mean_token_sum_norm` (Dr. GRPO); None takes `rollout.max_response_length`."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy, a bonus in the loss."""
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
