"""What a supervised run on preferences does at each step: rows of the next examples, their loss, and measures.

A task owns the examples of a run and is asked by their places, so that what is known of each (the reference's
log-probs) is computed once. All methods are collective.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hybridrl.algorithms.preference_losses import kto_divergence
from hybridrl.config.schema import PreferenceConfig
from hybridrl.data.preferences import Pair, Verdict
from hybridrl.training.critic import RewardModel
from hybridrl.training.losses import AnyLoss
from hybridrl.training.preference import Pairs, ScoredPairs, Verdicts, pair_rows, verdict_rows
from hybridrl.training.rows import Floats, Row


class Scorer(Protocol):
    """A policy, or its reference."""

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row."""


class Task(Protocol):
    """See the module."""

    def prepare(self) -> None:
        """Before the first update: computes what is known of all examples."""

    def rows(self, places: Sequence[int]) -> list[Row]:
        """The rows of these examples, ready for an update."""

    def loss(self, rows: Sequence[Row]) -> AnyLoss:
        """What an update on these rows minimises."""

    def measure(self, places: Sequence[int]) -> dict[str, float]:
        """How the model does on these examples, by names without a prefix."""

    def state_dict(self) -> dict[str, Any]:
        """What `prepare` computed: it is of the model as it started, which is gone when a run goes on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place of `prepare`."""


class PairTask:
    """A policy that learns from pairs."""

    def __init__(
        self, config: PreferenceConfig, examples: Sequence[Pair], policy: Scorer, reference: Scorer | None
    ) -> None:
        self._config, self._examples, self._policy = config, examples, policy
        self._known = _References(config, policy, reference)

    def prepare(self) -> None:
        self._known.precompute(self._plain(range(len(self._examples))), each=2)

    def rows(self, places: Sequence[int]) -> list[Row]:
        return self._known.give(self._plain(places), places)

    def loss(self, rows: Sequence[Row]) -> Pairs:
        return Pairs(config=self._config, count=len(rows) // 2)

    def measure(self, places: Sequence[int]) -> dict[str, float]:
        """Rewards β·(log-ratio) of chosen and rejected responses, their margin, and the share of pairs that it orders
        right."""
        rows = self.rows(places)
        gains = _gains(rows, self._policy.log_probs(rows)) * self._config.beta
        return _pair_measures(gains[0::2], gains[1::2])

    def state_dict(self) -> dict[str, Any]:
        return {"known": self._known.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known.known = state["known"]

    def _plain(self, places: Sequence[int]) -> list[Row]:
        return pair_rows([self._examples[i] for i in places], length_normalized=self._config.length_normalized)


class VerdictTask:
    """A policy that learns from single responses with a label (KTO)."""

    def __init__(
        self, config: PreferenceConfig, examples: Sequence[Verdict], policy: Scorer, reference: Scorer | None
    ) -> None:
        self._config, self._examples, self._policy = config, examples, policy
        self._known, self._strange = (_References(config, policy, reference) for _ in range(2))

    def prepare(self) -> None:
        everything = range(len(self._examples))
        self._known.precompute(self._plain(everything), each=1)
        self._strange.precompute(self._mismatched(everything), each=1)

    def rows(self, places: Sequence[int]) -> list[Row]:
        """The divergence is the policy's as it stands, of each prompt with the next example's response."""
        strange = self._strange.give(self._mismatched(places), places)
        gains = _gains(strange, self._policy.log_probs(strange))
        divergence = float(kto_divergence(torch.from_numpy(gains)))
        return [row.with_fields(divergence=divergence) for row in self._known.give(self._plain(places), places)]

    def loss(self, rows: Sequence[Row]) -> Verdicts:
        desirable = sum(float(row.fields["side"][0]) > 0 for row in rows)
        return Verdicts(config=self._config, count=len(rows), desirable=desirable)

    def measure(self, places: Sequence[int]) -> dict[str, float]:
        """Mean rewards β·(log-ratio) of good and of bad responses, and the difference; NaN where there are none."""
        rows = self._known.give(self._plain(places), places)
        gains = _gains(rows, self._policy.log_probs(rows)) * self._config.beta
        good = np.asarray([self._examples[i].desirable for i in places])
        means = [float(part.mean()) if len(part) else float("nan") for part in (gains[good], gains[~good])]
        return {"desirable": means[0], "undesirable": means[1], "margin": means[0] - means[1]}

    def state_dict(self) -> dict[str, Any]:
        return {"known": self._known.known, "strange": self._strange.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known.known, self._strange.known = state["known"], state["strange"]

    def _plain(self, places: Sequence[int]) -> list[Row]:
        return verdict_rows([self._examples[i] for i in places], length_normalized=self._config.length_normalized)

    def _mismatched(self, places: Sequence[int]) -> list[Row]:
        count = len(self._examples)
        made = [
            Verdict(self._examples[i].answered_by(self._examples[(i + 1) % count]), self._examples[i].desirable)
            for i in places
        ]
        return verdict_rows(made, length_normalized=self._config.length_normalized)


class RewardTask:
    """A reward model that learns from pairs."""

    def __init__(self, examples: Sequence[Pair], model: RewardModel) -> None:
        self._examples, self._model = examples, model

    def prepare(self) -> None:
        """Nothing is known before."""

    def rows(self, places: Sequence[int]) -> list[Row]:
        return pair_rows([self._examples[i] for i in places], scored=True)

    def loss(self, rows: Sequence[Row]) -> ScoredPairs:
        return ScoredPairs(count=len(rows) // 2)

    def measure(self, places: Sequence[int]) -> dict[str, float]:
        """Scores of chosen and rejected responses, their margin, and the share of pairs that it orders right."""
        scores = self._model.scores_of_rows(self.rows(places))
        return _pair_measures(scores[0::2], scores[1::2])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is known before."""


class _References:
    """Log-probs of the policy as it started: from a reference model, or precomputed."""

    def __init__(self, config: PreferenceConfig, policy: Scorer, reference: Scorer | None) -> None:
        self._policy, self._reference = policy, reference
        self._wanted = config.loss != "simpo"
        self.known: list[list[Floats]] = []
        """By example; empty where a reference model is there to ask."""

    def precompute(self, rows: Sequence[Row], each: int) -> None:
        """Takes the policy's log-probs of all rows, `each` of one example, if no reference model is there to ask."""
        if self._wanted and self._reference is None:
            found = self._policy.log_probs(rows)
            self.known = [found[start : start + each] for start in range(0, len(found), each)]

    def give(self, rows: Sequence[Row], places: Sequence[int]) -> list[Row]:
        """The rows of these examples with `ref_log_probs`."""
        if not self._wanted:
            return list(rows)
        if self._reference is not None:
            found = self._reference.log_probs(rows)
        else:
            found = [values for place in places for values in self.known[place]]
        return [row.with_fields(ref_log_probs=values) for row, values in zip(rows, found, strict=True)]


def _gains(rows: Sequence[Row], log_probs: Sequence[Floats]) -> Floats:
    """[n]: each row's score, the sum or mean of its log-probs over those of the reference where it has one."""
    sums = []
    for row, values in zip(rows, log_probs, strict=True):
        gains = (values - row.fields["ref_log_probs"] if "ref_log_probs" in row.fields else values) * row.fields[
            "scale"
        ]
        sums.append(gains[row.mask].sum(dtype=np.float64))
    return np.asarray(sums, np.float32)


def _pair_measures(chosen: Floats, rejected: Floats) -> dict[str, float]:
    return {
        "chosen": float(chosen.mean()),
        "rejected": float(rejected.mean()),
        "margin": float((chosen - rejected).mean()),
        "accuracy": float((chosen > rejected).mean()),
    }
