"""A step's batch as its updates take it: mini-batches, the tokens' weights, and the metrics of all updates together."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from hybridrl.algorithms.aggregate import token_weights
from hybridrl.algorithms.covariance import covariances, select_highest, select_in_range
from hybridrl.config.schema import Config, TrainerConfig
from hybridrl.rollout.seeds import sample_seed
from hybridrl.training.rows import Row
from hybridrl.training.trained import Trained


def places_by_update(trainer: TrainerConfig, step: int) -> Iterator[list[int]]:
    """Places among a step's prompts, for each update: `trainer.mini_batch_prompts`, `trainer.update_epochs` times over.

    The first pass takes the prompts in their order, each further one in an order of its own by (seed, step, pass).
    """
    prompts = trainer.prompts_per_step
    size = trainer.mini_batch_prompts or prompts
    order = list(range(prompts))
    for epoch in range(trainer.update_epochs):
        if epoch:
            random.Random(f"{trainer.seed}/{step}/{epoch}").shuffle(order)
        yield from (order[start : start + size] for start in range(0, prompts, size))


def mini_batches(rows: Sequence[Row], trainer: TrainerConfig, step: int) -> Iterator[list[Row]]:
    """The rows of each update of a step, in whole groups (see `places_by_update`).

    Raises ValueError where the rows are not `trainer.prompts_per_step` groups of one size.
    """
    prompts = trainer.prompts_per_step
    n, rest = divmod(len(rows), prompts)
    if rest:
        raise ValueError(f"{len(rows)} rows are not trainer.prompts_per_step={prompts} groups of one size")
    for groups in places_by_update(trainer, step):
        places = [group * n + i for group in groups for i in range(n)]
        yield [replace(rows[place], index=index) for index, place in enumerate(places)]


def with_selection(rows: Sequence[Row], config: Config, step: int, update: int) -> list[Row]:
    """The rows of one whole update, with the tokens of high covariance marked (`selected`) where the loss asks for it.

    Needs `old_log_probs` and `advantages`. What is drawn depends on the run's seed, the step and its update.
    """
    loss, covariance = config.algorithm.policy_loss, config.algorithm.covariance
    if loss not in ("clip_cov", "kl_cov"):
        return list(rows)
    trained = Trained(rows)
    cov = covariances(trained.values("old_log_probs"), trained.values("advantages"))
    if loss == "kl_cov":
        return trained.write(selected=select_highest(cov, fraction=covariance.fraction))
    seed = sample_seed(config.trainer.seed, step, update, 0)
    bounds = {"low": covariance.low, "high": covariance.high, "fraction": covariance.fraction}
    return trained.write(selected=select_in_range(cov, seed=seed, **bounds))


def with_weights(rows: Sequence[Row], aggregate: str, norm: int | None) -> list[Row]:
    """The rows of one whole update, with the weight of each token in the loss (see `hybridrl.algorithms.aggregate`)."""
    lengths = torch.tensor([row.trained for row in rows], dtype=torch.long)
    weights = token_weights(aggregate, lengths, norm).tolist()
    return [row.with_fields(weights=w) for row, w in zip(rows, weights, strict=True)]


TOTALS = ("tokens/trained", "micro_batches", "update/skipped")
"""Metrics of an update that add up over the updates of a step; the others are averaged."""


def combine(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates. Those of the ratio also for the last update alone, which is the
    one whose samples are the most updates old."""
    whole = {key: sum(update[key] for update in updates) / (1 if key in TOTALS else len(updates)) for key in updates[0]}
    last = {f"{key}_last": value for key, value in updates[-1].items() if key.startswith("ratio/")}
    return whole | {"updates": float(len(updates))} | (last if len(updates) > 1 else {})
