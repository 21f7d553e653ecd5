"""`hybridrl.train`, of which rank 1 raises in the phase that FAIL_PHASE names."""

import os
from typing import Any

from hybridrl import saved, session, train
from hybridrl.rollout.replicas import Replicas
from hybridrl.training.actor import Actor

PHASES: dict[str, tuple[Any, str]] = {
    "start": (session.Session, "_start_judges"),
    "sync": (session.Session, "rollout_phase"),
    "rollout": (Replicas, "generate"),
    "reward": (session.Judges, "score"),
    "update": (Actor, "_accumulate"),
    "export": (saved, "export_weights"),
}


def break_phase(phase: str) -> None:
    """Makes the phase raise on this rank."""

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(f"this rank is broken in {phase}")

    owner, name = PHASES[phase]
    assert callable(getattr(owner, name))
    setattr(owner, name, broken)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        break_phase(os.environ["FAIL_PHASE"])
    train.main()
