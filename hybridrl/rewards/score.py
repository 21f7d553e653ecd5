"""Scoring samples: every judge on every sample, the weighted sum as the reward, failures as the configuration says."""

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from hybridrl.config.schema import JudgeConfig, RewardsConfig
from hybridrl.rewards.pool import Job, JudgePool, Pool, Verdict
from hybridrl.rollout.samples import Sample

FAILURES = (
    "timeout", "batch_timeout", "died", "memory", "exception", "missing", "invalid", "unsendable", "no_worker",
)  # fmt: skip
"""Kinds of failure; each has a metric `reward/errors/<kind>`."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


class Judges:
    """The judges of a run, in a pool of worker processes while it is entered. Without any, every reward is 0.

    Raises ValueError when entered, if a judge cannot be imported or called.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._names = judge_names(config.judges)
        self._pool = make_pool(config) if config.judges else None

    def __enter__(self) -> Self:
        if self._pool is not None:
            self._pool.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def score(self, samples: Sequence[Sample], tokenizer: Decoder) -> dict[str, float]:
        """Sets `reward`, `rewards` and `failed` of each sample; returns counts of failures, which add over ranks.

        A sample on which any judge failed gets the reward `rewards.default`, or under `rewards.on_error=mask` none at
        all and `failed=True`. Judges read what the policy wrote and nothing else (`own_text`).

        Metrics: `reward/errors` samples that a judge failed on, `reward/timeouts` those that ran out of time, and
        `reward/errors/<kind>` failures by kind. What the rewards were is told by `reward_metrics`.
        """
        texts = [own_text(sample, tokenizer) for sample in samples]
        jobs = [
            Job(judge, text, sample.prompt.answer, sample.prompt.metadata)
            for sample, text in zip(samples, texts, strict=True)
            for judge in range(len(self._names))
        ]
        verdicts = self._pool.run(jobs) if self._pool is not None else []
        width = len(self._names)
        for index, sample in enumerate(samples):
            self._settle(sample, verdicts[index * width : (index + 1) * width])
        return _failure_counts(verdicts, width)

    def _settle(self, sample: Sample, verdicts: Sequence[Verdict]) -> None:
        sample.rewards = {}
        total = 0.0
        for name, judge, verdict in zip(self._names, self._config.judges, verdicts, strict=True):
            for key, score in (verdict.scores or {}).items():
                sample.rewards[name if key == "score" else f"{name}/{key}"] = score
            total += judge.weight * (verdict.scores or {}).get("score", 0.0)
        broken = any(verdict.scores is None for verdict in verdicts)
        sample.failed = broken and self._config.on_error == "mask"
        sample.reward = None if sample.failed else self._config.default if broken else total


def make_pool(config: RewardsConfig) -> Pool:
    """The pool that `rewards.pool` names, not started."""
    kind: Any = JudgePool
    if config.pool == "ray":
        kind = importlib.import_module("hybridrl.rewards.ray_pool").RayJudgePool
    made: Pool = kind(
        [(judge.name, judge.args) for judge in config.judges],
        size=config.workers,
        timeout_s=config.timeout_s,
        batch_timeout_s=config.batch_timeout_s,
        memory_mb=config.memory_mb,
    )
    return made


def own_text(sample: Sample, tokenizer: Decoder) -> str:
    """The policy's own text: tokens whose mask is True, special tokens left out.

    Runs of own tokens that are separated by others (a tool's output, say) are decoded apart and joined by a line
    break, so that nothing arises across the gap that the policy did not write.
    """
    runs: list[list[int]] = []
    previous = False
    for token, own in zip(sample.response_ids, sample.mask, strict=True):
        if own and not previous:
            runs.append([])
        if own:
            runs[-1].append(token)
        previous = own
    return "\n".join(str(tokenizer.decode(run, skip_special_tokens=True)) for run in runs)


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`reward/mean`, `reward/std` (population) and each judge's mean as `reward/<name>`, over the judged samples.

    Call it on the samples of all ranks: means and deviations of parts do not add up. NaN if no sample has a reward.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return {"reward/mean": math.nan, "reward/std": math.nan}
    mean = math.fsum(rewards) / len(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
    }
    for name in sorted({name for sample in samples for name in sample.rewards}):
        scores = [sample.rewards[name] for sample in samples if name in sample.rewards]
        metrics[f"reward/{name}"] = math.fsum(scores) / len(scores)
    return metrics


def judge_names(judges: Sequence[JudgeConfig]) -> list[str]:
    """Names of the judges, those that occur again numbered: math, math_2."""
    seen: Counter[str] = Counter()
    names = []
    for judge in judges:
        seen[judge.name] += 1
        names.append(judge.name if seen[judge.name] == 1 else f"{judge.name}_{seen[judge.name]}")
    return names


def _failure_counts(verdicts: Sequence[Verdict], width: int) -> dict[str, float]:
    kinds = Counter(verdict.kind for verdict in verdicts if verdict.scores is None)
    by_sample = [
        {verdict.kind for verdict in verdicts[start : start + width] if verdict.scores is None}
        for start in range(0, len(verdicts), max(1, width))
    ]
    return {
        "reward/errors": float(sum(bool(found) for found in by_sample)),
        "reward/timeouts": float(sum(bool(found & {"timeout", "batch_timeout"}) for found in by_sample)),
        **{f"reward/errors/{kind}": float(kinds[kind]) for kind in FAILURES},
    }
