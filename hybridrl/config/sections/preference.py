"""Learning from preferences: pairs of responses, or responses that were judged good or bad."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class PreferenceConfig:
    """The loss of `algorithm.name=preference`, and how both it and `reward_model` are measured."""

    loss: str = "dpo"
    """`dpo`, `cdpo`, `ipo`, `simpo` (pairs) or `kto` (single responses with a label)."""
    beta: float = 0.1
    """Strength of the tie to the reference model: reward = beta · log-ratio. IPO's τ; SimPO's scale."""
    label_smoothing: float = 0.0
    """Of `cdpo`: the probability that a pair's label is wrong."""
    target_margin: float = 0.0
    """γ of `simpo`: by how much the chosen response's reward must exceed the rejected one's."""
    length_normalized: bool = False
    """Take means over a response's tokens instead of sums. `simpo` always does, and wants true here."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    """λ_D and λ_U of `kto`."""
    reference: str = "precomputed"
    """Log-probs of the policy as it started: `precomputed` once for all data, with no second model, or `on_the_fly` by
    a reference model for each batch."""
    holdout: int = 0
    """Rows at the end of the data that are not trained but measured (`holdout/*`)."""
    holdout_every: int = 10
    """Steps between measures; the first and the last step are always measured."""


@dataclass(kw_only=True)
class TeacherConfig:
    """The model that `algorithm.name=distill` learns from, on the policy's own samples."""

    path: str | None = None
    """A Hugging Face folder with the policy's vocabulary; its sizes may differ."""
    discount: float = 0.0
    """How much of the divergence of later tokens a token answers for; 0: of its own alone."""
