"""`hybridrl.train`, of which one rank fails at the place and in the way that FAIL describes (a `Failure` as JSON)."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl import saved, session, train
from hybridrl.checkpoint.files import RankWriter
from hybridrl.checkpoint.save import Saver
from hybridrl.data.stream import PromptStream
from hybridrl.rollout.replicas import Replicas
from hybridrl.training.actor import Actor

PHASES: dict[str, tuple[Any, str]] = {
    "start": (session.Session, "_start_judges"),
    "data": (PromptStream, "next"),
    "sync": (session.Session, "rollout_phase"),
    "rollout": (Replicas, "generate"),
    "reward": (session.Judges, "score"),
    "logprob": (Actor, "score"),
    "update": (Actor, "_accumulate"),
    "save": (RankWriter, "write"),
    "commit": (Saver, "poll"),
    "export": (saved, "export_weights"),
}
EXIT_STATUS = 3


@dataclass(frozen=True)
class Failure:
    """How `rank` fails when it comes to a phase for the n-th time."""

    phase: str
    kind: str = "exception"
    """`exception`, `exit`, `sleep`, `SIGSTOP`, or another signal that it gets."""
    rank: int = 1
    count: int = 1
    told: str | None = None
    """A file that is written at that moment."""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


def fail(failure: Failure) -> None:
    """Fails, unless the way is a signal that the run goes on after."""
    if failure.told is not None:
        Path(failure.told).write_text(str(time.time()))
    if failure.kind == "exception":
        raise RuntimeError(f"this rank is broken in {failure.phase}")
    if failure.kind == "exit":
        os._exit(EXIT_STATUS)
    if failure.kind == "sleep":
        time.sleep(600)
    else:
        os.kill(os.getpid(), getattr(signal, failure.kind))


def install(failure: Failure) -> None:
    """Has this process fail so."""
    owner, name = PHASES[failure.phase]
    whole: Callable[..., Any] = getattr(owner, name)
    seen = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == failure.count:
            fail(failure)
        return whole(*args, **kwargs)

    setattr(owner, name, broken)


if __name__ == "__main__":
    wanted = Failure(**json.loads(os.environ["FAIL"]))
    if int(os.environ["RANK"]) == wanted.rank:
        install(wanted)
    train.main()
