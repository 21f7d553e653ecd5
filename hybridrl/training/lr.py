"""The learning-rate schedule: a pure function of the step."""

import math

from hybridrl.config.schema import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, total: int) -> float:
    """The learning rate of update `step`, counted from 1, of `total`.

    The warm-up is linear: update k of w has lr·k/w. After it the rate is constant, or falls linearly or by a half
    cosine to `min_lr` at update `total` (and stays there). Raises ValueError for an unknown schedule.
    """
    warmup, peak, floor = config.warmup_steps, config.lr, config.min_lr
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "linear":
        return peak + (floor - peak) * done
    if config.schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
    raise ValueError(f"optimizer.schedule={config.schedule!r} is none of constant, linear, cosine")
