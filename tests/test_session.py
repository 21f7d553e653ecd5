"""What a session decides by itself, without a world."""

from types import SimpleNamespace

import numpy as np
import pytest

from hybridrl.config.schema import Config
from hybridrl.session import MismatchError, Session
from hybridrl.training.rows import Row


@pytest.mark.parametrize(("trainers", "ends"), [(-1.05, False), (-1.2, True), (float("nan"), True), (-np.inf, True)])
def test_a_run_ends_where_the_mismatch_is_not_within_its_limit(trainers: float, ends: bool) -> None:
    config = Config()
    config.mismatch.stop.mean = 0.1
    fields = {"rollout_log_probs": np.full(2, -1.0, np.float32)}
    row = Row(index=0, token_ids=np.zeros(2, np.int64), mask=np.array([False, True]), fields=fields)
    session = Session(config)
    session.reference = None
    session.actor = SimpleNamespace(log_probs=lambda rows: [np.full(2, trainers, np.float32) for _ in rows])  # type: ignore[assignment]
    if ends:
        with pytest.raises(MismatchError, match=r"mismatch.stop.mean=0.1"):
            session.score([row])
    else:
        session.score([row])
