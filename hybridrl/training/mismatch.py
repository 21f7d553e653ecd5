"""How far the trainer's log-probs of the sampled tokens are from the engine's, and what is too far."""

from collections.abc import Sequence

from hybridrl.algorithms.corrections import effective_sample_size, importance_weights
from hybridrl.algorithms.kl import k3
from hybridrl.config.schema import LimitsConfig
from hybridrl.training.rows import Row
from hybridrl.training.trained import Trained

METRICS = {
    "mean": "mismatch/logprob_abs_mean",
    "max": "mismatch/logprob_abs_max",
    "kl": "mismatch/kl",
    "ess": "mismatch/ess",
}
"""The metric of each limit."""


class MismatchError(RuntimeError):
    """Trainer and engine disagree about the sampled tokens by more than `mismatch.stop` allows."""


def mismatch(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics over the trained tokens, of `old_log_probs`, the trainer's, against `rollout_log_probs`.

    - `mismatch/logprob_abs_mean`, `/logprob_abs_max`: of the difference;
    - `mismatch/kl`: KL(engine ‖ trainer) by token, estimated by k3;
    - `mismatch/ess`, `/ess_sequence`: effective sample size, in (0, 1], of tokens weighted by ρ, and of responses
      weighted by its product.

    Zeros, and sample sizes of 1, where nothing is trained.
    """
    trained = Trained(rows)
    ours, engine = trained.values("old_log_probs"), trained.values("rollout_log_probs")
    some, gap = len(ours) > 0, (ours - engine).abs()
    by_token = importance_weights(ours - engine, trained.segments, "token")
    by_response = importance_weights(trained.segments.total(ours - engine), trained.segments, "token")
    return {
        METRICS["mean"]: float(gap.mean()) if some else 0.0,
        METRICS["max"]: float(gap.max()) if some else 0.0,
        METRICS["kl"]: float(k3(engine, ours).mean()) if some else 0.0,
        METRICS["ess"]: float(effective_sample_size(by_token)),
        "mismatch/ess_sequence": float(effective_sample_size(by_response[trained.lengths > 0])),
    }


def beyond(gap: dict[str, float], limits: LimitsConfig, section: str) -> list[str]:
    """What exceeds a limit, each with its option; `section` is `mismatch.warn` or `mismatch.stop`. NaN exceeds all."""
    found = []
    for name, metric in METRICS.items():
        limit, value = getattr(limits, name), gap[metric]
        if limit is None:
            continue
        within, sign = (value >= limit, "under") if name == "ess" else (value <= limit, "over")
        if not within:
            found.append(f"{metric} is {value:.6g}, {sign} {section}.{name}={limit}")
    return found
