"""Groups of samples until a step is full. Groups whose rewards are all alike are dropped, and made up by further ones.

Source: dynamic sampling, DAPO (Yu et al. 2025), eq. 11. Alike is judged on the task's reward, within a tolerance, and
not on a reward that was shaped by length or divergence, which nearly always differs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.config.schema import DynamicSamplingConfig
from hybridrl.rollout.samples import Finish, Group, Prompt, Request, Sample


class NoSignalError(RuntimeError):
    """The batches that a step may generate held too few groups with a signal."""


class GroupPool:
    """The groups of the step to come. With dynamic sampling off every group counts, and one batch fills a step.

    All of the state of dynamic sampling is here: saved and loaded at any moment, no group that was kept is lost.
    Alike on all ranks, as the samples are.

    Args:
        size: groups of a step.
    """

    def __init__(self, config: DynamicSamplingConfig, size: int) -> None:
        self._config = config
        self._size = size
        self._kept: list[Group] = []
        self._batches = 0
        self._alike: Counter[float] = Counter()
        """Groups of this step whose rewards were alike, by that reward."""
        self._seen = 0
        self._discarded = 0
        """Tokens of samples of this step that are not trained."""

    @property
    def batch(self) -> int:
        """Prompts to generate for at a time."""
        return (self._config.generation_prompts if self._config.enabled else None) or self._size

    @property
    def full(self) -> bool:
        """Whether the step has all its groups."""
        return len(self._kept) >= self._size

    @property
    def one_batch(self) -> bool:
        """Whether it is known beforehand that one batch fills the step."""
        return not self._config.enabled

    def check(self) -> None:
        """Raises NoSignalError where the step is not full and may generate no further batch."""
        most = self._config.max_generation_batches
        if self.full or not most or self._batches < most:
            return
        alike = sum(self._alike.values())
        shares = ", ".join(f"{n / max(1, self._seen):.0%} all {v:g}" for v, n in self._alike.most_common(3))
        raise NoSignalError(
            f"{self._batches} batches of {self.batch} prompts (algorithm.dynamic_sampling.max_generation_batches="
            f"{most}) gave {len(self._kept)} of the {self._size} groups of a step: the rewards of {alike} of "
            f"{self._seen} groups were alike ({shares or 'none'}). Take prompts of another difficulty, a larger "
            "rollout.n or rollout.temperature, a finer reward, or allow more batches (0 for no limit)"
        )

    def add(self, requests: Sequence[Request], samples: Sequence[Sample]) -> None:
        """Takes a generated and judged batch. A sample drawn at a temperature of 0 is its group's greedy one."""
        groups = _by_prompt(requests, samples)
        self._batches += 1
        self._seen += len(groups)
        for group in groups:
            if not self._config.enabled or self._has_signal(group):
                self._kept.append(group)
            else:
                self._discarded += _tokens(group)

    def take(self) -> tuple[list[Group], dict[str, float]]:
        """The step's groups, oldest first, and metrics; then the pool is ready for the next step.

        Metrics, with dynamic sampling: `sampling/batches`, `/groups` (generated), `/alike` (share of them without a
        signal), `/pending` (kept for the next step) and `tokens/discarded` (generated in this step and thrown away).
        """
        if not self.full:
            raise RuntimeError(f"{len(self._kept)} of {self._size} groups are there; a step takes all of them")
        taken, rest = self._kept[: self._size], self._kept[self._size :]
        if self._config.surplus == "drop":
            self._discarded += sum(map(_tokens, rest))
            rest = []
        metrics = {
            "sampling/batches": float(self._batches),
            "sampling/groups": float(self._seen),
            "sampling/alike": sum(self._alike.values()) / max(1, self._seen),
            "sampling/pending": float(len(rest)),
            "tokens/discarded": float(self._discarded),
        }
        self._kept, self._batches, self._seen, self._discarded = rest, 0, 0, 0
        self._alike.clear()
        return taken, metrics if self._config.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers, text, lists and (for the experts of a token) arrays."""
        return {
            "kept": [_pack(group) for group in self._kept],
            "batches": self._batches,
            "alike": [[value, count] for value, count in self._alike.items()],
            "seen": self._seen,
            "discarded": self._discarded,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: in the middle of a step, too."""
        self._kept = [_unpack(group) for group in state["kept"]]
        self._batches, self._seen, self._discarded = state["batches"], state["seen"], state["discarded"]
        self._alike = Counter(dict(state["alike"]))

    def _has_signal(self, group: Group) -> bool:
        members = [*group.samples, *([group.greedy] if group.greedy is not None else [])]
        scores = [self._score(sample) for sample in members if not sample.failed]
        rewards = torch.tensor(scores, dtype=torch.float64)
        differs = Groups(rewards, torch.zeros(len(scores), dtype=torch.long)).differ(self._config.tolerance)
        if bool(differs.any()):
            return True
        self._alike[scores[0] if scores else float("nan")] += 1
        return False

    def _score(self, sample: Sample) -> float:
        judge = self._config.judge
        score = sample.reward if judge is None else sample.rewards.get(judge)
        if score is None:
            raise ValueError(
                f"prompt {sample.prompt.id}, sample {sample.index} has no score by "
                f"algorithm.dynamic_sampling.judge={judge}; it has {', '.join(sample.rewards) or 'none'}"
            )
        return score


def _by_prompt(requests: Sequence[Request], samples: Sequence[Sample]) -> list[Group]:
    """Groups by prompt id, in the order in which ids first occur."""
    drawn: dict[int, list[Sample]] = {}
    greedy: dict[int, Sample] = {}
    for request, sample in zip(requests, samples, strict=True):
        own = drawn.setdefault(sample.prompt.id, [])
        if request.params.temperature == 0:
            greedy[sample.prompt.id] = sample
        else:
            own.append(sample)
    return [Group(samples=tuple(own), greedy=greedy.get(prompt)) for prompt, own in drawn.items()]


def _tokens(group: Group) -> int:
    return sum(sum(sample.mask) for sample in group.samples)


def _pack(group: Group) -> dict[str, Any]:
    greedy = None if group.greedy is None else _plain(group.greedy)
    return {"samples": [_plain(sample) for sample in group.samples], "greedy": greedy}


def _plain(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "finish": str(sample.finish)}


def _unpack(packed: dict[str, Any]) -> Group:
    greedy = packed["greedy"]
    return Group(samples=tuple(map(_sample, packed["samples"])), greedy=None if greedy is None else _sample(greedy))


def _sample(packed: dict[str, Any]) -> Sample:
    prompt = {**packed["prompt"], "token_ids": tuple(packed["prompt"]["token_ids"])}
    return Sample(**{**packed, "prompt": Prompt(**prompt), "finish": Finish(packed["finish"])})
