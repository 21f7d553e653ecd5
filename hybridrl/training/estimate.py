"""From judged groups of samples to the advantage of every trained token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.overlong import soft_punishment
from hybridrl.algorithms.whiten import whiten
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.rollout.samples import Group, Sample
from hybridrl.training.rows import Row
from hybridrl.training.trained import Trained


def with_advantages(
    rows: Sequence[Row], groups: Sequence[Group], algorithm: AlgorithmConfig, *, kl_coef: float = 0.0
) -> tuple[list[Row], dict[str, float]]:
    """The rows with `advantages` on their trained tokens, and metrics.

    Args:
        rows: one for each sample of `groups`, in order; with `old_log_probs` and `ref_log_probs` where
            `algorithm.kl.where` is not `none`.
        kl_coef: what `algorithm.kl.coef` has become; counts where the divergence is in the reward or the return.

    Metrics: `advantage/mean`, `/std` over trained tokens, before whitening; `kl/response`, the mean divergence of a
    response from the reference in nats, and `kl/coef`, where there is one; `reward/overlong`, the mean punishment of
    length, where there is one. Raises ValueError if a sample that did not fail has no reward.
    """
    shaped = shape(rows, groups, algorithm, kl_coef)
    trained, rewards, kl = shaped.trained, shaped.rewards, shaped.kl
    if kl is not None and algorithm.kl.where == "reward":
        rewards = rewards - kl_coef * trained.segments.total(kl)
    advantages = trained.segments.spread(estimate(groups, rewards, trained.lengths, algorithm).double())
    if kl is not None and algorithm.kl.where == "return":
        advantages = advantages - kl_coef * _to_go(kl, trained)
    return finish(shaped, advantages, algorithm)


@dataclass(frozen=True)
class Shaped:
    """What every estimator of advantages starts from."""

    trained: Trained
    rewards: Tensor
    """[n] float64: of the judges, with the punishment of length."""
    kl: Tensor | None
    """[t] float64: divergence from the reference by trained token, where there is one."""
    metrics: dict[str, float]


def shape(rows: Sequence[Row], groups: Sequence[Group], algorithm: AlgorithmConfig, kl_coef: float) -> Shaped:
    """See `with_advantages`."""
    samples = [sample for group in groups for sample in group.samples]
    trained, kl, metrics = Trained(rows), None, {}
    if algorithm.kl.where != "none":
        kl = KL_ESTIMATORS[algorithm.kl.estimator](trained.values("old_log_probs"), trained.values("ref_log_probs"))
        metrics["kl/response"] = float(trained.segments.total(kl).mean())
        metrics["kl/coef"] = kl_coef
    rewards = task_rewards(samples)
    if algorithm.overlong.cache is not None:
        punishment = _overlong(samples, algorithm)
        rewards = rewards + punishment
        metrics["reward/overlong"] = float(punishment.mean())
    return Shaped(trained, rewards, kl, metrics)


def finish(
    shaped: Shaped, advantages: Tensor, algorithm: AlgorithmConfig, **fields: Tensor
) -> tuple[list[Row], dict[str, float]]:
    """The rows with `advantages` [t], whitened where asked for, and further fields [t]; and all metrics."""
    some = len(advantages) > 0
    metrics = {
        "advantage/mean": float(advantages.mean()) if some else 0.0,
        "advantage/std": float(advantages.std(unbiased=False)) if some else 0.0,
    }
    if algorithm.whiten:
        advantages = whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
    return shaped.trained.write(advantages=advantages, **fields), shaped.metrics | metrics


def estimate(groups: Sequence[Group], rewards: Tensor, lengths: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[n] float32 advantages of the samples of `groups`, in order; failed samples get 0.

    `rewards` [n] are those to learn from, `lengths` [n] the trained tokens.
    """
    samples = [sample for group in groups for sample in group.samples]
    advantages: Tensor = ADVANTAGES.call(
        algorithm.advantage,
        rewards=rewards,
        group_ids=torch.tensor([s.prompt.id for s in samples], dtype=torch.long),
        valid=torch.tensor([not s.failed for s in samples], dtype=torch.bool),
        lengths=lengths,
        baselines=_greedy_rewards(groups, algorithm),
        normalize=algorithm.normalize,
        pass_k=algorithm.pass_k,
    )
    return advantages


def task_rewards(samples: Sequence[Sample]) -> Tensor:
    """[n] float64: what the judges gave; 0 for a failed sample. Raises ValueError for one that was not judged."""
    unjudged = [(s.prompt.id, s.index) for s in samples if s.reward is None and not s.failed]
    if unjudged:
        raise ValueError(f"samples without a reward (prompt, sample): {unjudged[:8]}; judge them before training")
    return torch.tensor([0.0 if s.failed or s.reward is None else s.reward for s in samples], dtype=torch.float64)


def _greedy_rewards(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Tensor:
    """[n] float64: the reward of each sample's greedy companion, under the same shaping; NaN where there is none."""
    found = []
    for group in groups:
        value = float("nan")
        if group.greedy is not None and not group.greedy.failed:
            value = float(task_rewards([group.greedy]))
            if algorithm.overlong.cache is not None:
                value += float(_overlong([group.greedy], algorithm))
        found += [value] * len(group.samples)
    return torch.tensor(found, dtype=torch.float64)


def _overlong(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Tensor:
    """[n] float64: the soft punishment of each response's length."""
    config = algorithm.overlong
    assert config.cache is not None
    assert config.max_length is not None, "algorithm.overlong.max_length is filled in by resolve_defaults"
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    return soft_punishment(lengths, max_length=config.max_length, cache=config.cache, factor=config.factor)


def _to_go(values: Tensor, trained: Trained) -> Tensor:
    """[t]: for each token the sum over itself and the trained tokens after it in its response."""
    parts = values.split(trained.lengths.tolist())
    return torch.cat([values[:0], *(part.flip(0).cumsum(0).flip(0) for part in parts)])
