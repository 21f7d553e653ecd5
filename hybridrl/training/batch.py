"""What is known of a global batch before it is cut: advantages, token weights, the gap between trainer and engine."""

from collections.abc import Sequence

import numpy as np
import torch

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregate import token_weights
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.rollout.samples import Sample
from hybridrl.training.rows import Floats, Row


def estimate_advantages(samples: Sequence[Sample], algorithm: AlgorithmConfig, kl: "Floats | None" = None) -> Floats:
    """[n] float32 advantages of judged samples, grouped by prompt id; failed samples get 0.

    `kl` [n]: divergence of each response from the reference, subtracted from its reward times `algorithm.kl.coef`.
    Raises ValueError if a sample that did not fail has no reward.
    """
    unjudged = [(s.prompt.id, s.index) for s in samples if s.reward is None and not s.failed]
    if unjudged:
        raise ValueError(f"samples without a reward (prompt, sample): {unjudged[:8]}; judge them before training")
    rewards = torch.tensor([0.0 if s.failed or s.reward is None else s.reward for s in samples], dtype=torch.float64)
    if kl is not None:
        rewards = rewards - algorithm.kl.coef * torch.from_numpy(kl).double()
    ids = torch.tensor([s.prompt.id for s in samples], dtype=torch.long)
    valid = torch.tensor([not s.failed for s in samples], dtype=torch.bool)
    advantages: Floats = ADVANTAGES[algorithm.advantage](rewards, ids, valid, normalize=algorithm.normalize).numpy()
    return advantages


def with_advantages(rows: Sequence[Row], advantages: Floats) -> list[Row]:
    """The rows with each response's advantage [n] on all its tokens."""
    return [row.with_fields(advantages=float(a)) for row, a in zip(rows, advantages, strict=True)]


def with_weights(rows: Sequence[Row], aggregate: str, norm: int | None) -> list[Row]:
    """The rows of one whole update, with the weight of each token in the loss (see `hybridrl.algorithms.aggregate`)."""
    lengths = torch.tensor([row.trained for row in rows], dtype=torch.long)
    weights = token_weights(aggregate, lengths, norm).tolist()
    return [row.with_fields(weights=w) for row, w in zip(rows, weights, strict=True)]


def sequence_kl(rows: Sequence[Row], estimator: str) -> Floats:
    """[n] float32: KL of each response from the reference, summed over its trained tokens.

    Needs `old_log_probs` and `ref_log_probs`.
    """
    sums = [
        KL_ESTIMATORS[estimator](*(torch.tensor(r.fields[k][r.mask]) for k in ("old_log_probs", "ref_log_probs")))
        .sum()
        .item()
        for r in rows
    ]
    return np.asarray(sums, np.float32)


def mismatch(rows: Sequence[Row]) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the engine's, over trained tokens.

    Needs `old_log_probs` and `rollout_log_probs`. Zeros where nothing is trained.
    """
    gaps = [np.abs(r.fields["old_log_probs"] - r.fields["rollout_log_probs"])[r.mask] for r in rows]
    gap = np.concatenate(gaps) if gaps else np.zeros(0, np.float32)
    some = len(gap) > 0
    return {
        "mismatch/logprob_abs_mean": float(gap.mean(dtype=np.float64)) if some else 0.0,
        "mismatch/logprob_abs_max": float(gap.max()) if some else 0.0,
    }


TOTALS = ("tokens/trained", "micro_batches", "update/skipped")
"""Metrics of an update that add up over the updates of a step; the others are averaged."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates."""
    return {key: sum(update[key] for update in updates) / (1 if key in TOTALS else len(updates)) for key in updates[0]}
