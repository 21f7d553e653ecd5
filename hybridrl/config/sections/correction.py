"""What is done where the engine that sampled and the trainer disagree."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class CorrectionConfig:
    """Importance weights and rejection by ρ, the trainer's probability of a token over the engine's.

    By `token`; by `sequence`, the product of ρ over a response; or by `geometric`, its geometric mean.
    """

    weight: str = "none"
    """Multiplies each token's policy loss: `none`, `token`, `sequence` or `geometric`."""
    weight_low: float = 0.0
    weight_high: float = 2.0
    """Weights are truncated to [weight_low, weight_high]."""
    reject: str = "none"
    """Leaves out of the update what lies outside [reject_low, reject_high]: `none`, `token` (the token; IcePop),
    `sequence` or `geometric` (the response)."""
    reject_low: float = 0.5
    reject_high: float = 2.0
    """Bounds of ρ, or of what `reject` makes of it."""


@dataclass(kw_only=True)
class LimitsConfig:
    """Limits of a step's mismatch between trainer and engine. None for none."""

    mean: float | None = None
    """Most mean |log-prob difference| of the trained tokens."""
    max: float | None = None
    """Largest |log-prob difference| of a token."""
    kl: float | None = None
    """Most KL(engine ‖ trainer), by token."""
    ess: float | None = None
    """Least effective sample size of the tokens, in (0, 1]."""


@dataclass(kw_only=True)
class MismatchConfig:
    """What a mismatch between trainer and engine leads to."""

    warn: LimitsConfig = field(default_factory=LimitsConfig)
    """Beyond these it is said on the console."""
    stop: LimitsConfig = field(default_factory=LimitsConfig)
    """Beyond these the run ends, before the update."""
