"""What a session decides by itself, without a world."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridrl.config.schema import Config
from hybridrl.session import MismatchError, Session
from hybridrl.training.rows import Row


def actor_that_says(log_prob: float) -> Any:
    """Of every token."""

    def score(rows: list[Row], keep_routes: bool = False) -> Any:
        return SimpleNamespace(log_probs=[np.full(2, log_prob, np.float32) for _ in rows], routes=None)

    return SimpleNamespace(score=score)


@pytest.mark.parametrize(("trainers", "ends"), [(-1.05, False), (-1.2, True), (float("nan"), True), (-np.inf, True)])
def test_a_run_ends_where_the_mismatch_is_not_within_its_limit(trainers: float, ends: bool) -> None:
    config = Config()
    config.mismatch.stop.mean = 0.1
    fields = {"rollout_log_probs": np.full(2, -1.0, np.float32)}
    row = Row(index=0, token_ids=np.zeros(2, np.int64), mask=np.array([False, True]), fields=fields)
    session = Session(config)
    session.reference = None
    session.actor = actor_that_says(trainers)
    if ends:
        with pytest.raises(MismatchError, match=r"mismatch.stop.mean=0.1"):
            session.score([row])
    else:
        session.score([row])


def test_a_mismatch_beyond_its_warning_is_said_and_the_run_goes_on() -> None:
    config, said = Config(), []
    config.mismatch.warn.max = 0.1
    fields = {"rollout_log_probs": np.full(2, -1.0, np.float32)}
    row = Row(index=0, token_ids=np.zeros(2, np.int64), mask=np.array([False, True]), fields=fields)
    session = Session(config)
    session.reference = None
    session.note = said.append  # type: ignore[method-assign]
    for trainers in (-1.05, -1.5):
        session.actor = actor_that_says(trainers)
        rows, gap = session.score([row])
        assert rows[0].fields["old_log_probs"][1] == np.float32(trainers)
        assert gap["mismatch/logprob_abs_max"] == pytest.approx(-1 - trainers)
    assert said == ["mismatch of trainer and engine: mismatch/logprob_abs_max is 0.5, over mismatch.warn.max=0.1"]


def test_the_engines_log_probs_are_taken_as_they_are() -> None:
    config = Config()
    config.algorithm.old_log_probs = "engine"
    fields = {"rollout_log_probs": np.array([0.0, -1.5], np.float32)}
    row = Row(index=0, token_ids=np.zeros(2, np.int64), mask=np.array([False, True]), fields=fields)
    session = Session(config)
    session.reference = None
    rows, gap = session.score([row])
    assert rows[0].fields["old_log_probs"].tolist() == [0.0, -1.5]
    assert gap == {}
