"""Correcting a batch for the engine that sampled it: importance weights, and tokens or responses left out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybridrl.algorithms.corrections import importance_weights
from hybridrl.config.schema import CorrectionConfig
from hybridrl.training.rows import Row
from hybridrl.training.trained import Trained


def correct(rows: Sequence[Row], config: CorrectionConfig) -> tuple[list[Row], dict[str, float]]:
    """The rows, each with its tokens' weights as `importance` and with rejected tokens no longer trained.

    Needs `old_log_probs`, the trainer's, and `rollout_log_probs`. Both the weights and what is rejected look at all
    trained tokens of a response, as they came. Metrics, where asked for: `correction/weight_mean`, `/truncated` (share
    of tokens whose weight was cut) and `/rejected` (share of tokens left out).
    """
    trained, metrics = Trained(rows), {}
    if config.weight == config.reject == "none":
        return list(rows), {}
    ratios = trained.values("old_log_probs") - trained.values("rollout_log_probs")
    count = max(1, len(ratios))
    kept = list(rows)
    if config.weight != "none":
        weights = importance_weights(ratios, trained.segments, config.weight)
        cut = weights.clamp(config.weight_low, config.weight_high)
        kept = trained.write(importance=cut)
        metrics["correction/weight_mean"] = float(cut.sum()) / count
        metrics["correction/truncated"] = float((cut != weights).sum()) / count
    if config.reject != "none":
        weights = importance_weights(ratios, trained.segments, config.reject)
        outside = (weights < config.reject_low) | (weights > config.reject_high)
        kept = [_without(row, marked) for row, marked in zip(kept, trained.write(rejected=outside), strict=True)]
        metrics["correction/rejected"] = float(outside.sum()) / count
    return kept, metrics


def _without(row: Row, marked: Row) -> Row:
    return replace(row, mask=np.logical_and(row.mask, marked.fields["rejected"] == 0))
