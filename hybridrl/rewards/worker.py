"""One judging process: `python -m hybridrl.rewards.worker <connection> <life>`, two inherited descriptors.

It first forks a guard, which only waits for the end of the life pipe, whose other end the trainer alone holds. When the
trainer is gone, however it went, the guard kills the whole process group: this process, itself, and whatever a judge
has started. That works while a judge holds the interpreter lock, and from whichever thread the pool was started (a
parent-death signal would come when that thread ends).

Messages: the trainer sends pickles, first the judges, then jobs; the worker answers in JSON, as nothing that a judge
made is to be unpickled in the trainer.
"""

import json
import math
import os
import pickle
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from hybridrl.rewards.judges import Judge, resolve

REASON_LENGTH = 2_000


def main(connection_fd: int, life_fd: int) -> None:
    """Judges until the connection closes."""
    _silence()
    _fork_guard(connection_fd, life_fd)
    connection = Connection(connection_fd)
    try:
        setup = pickle.loads(connection.recv_bytes())
        judges = [(resolve(name, args), args) for name, args in setup["judges"]]
        _limit_memory(setup["memory_mb"])
    except Exception as error:  # noqa: BLE001  importing a judge runs its code; the trainer raises what is told here
        _answer(connection, {"refused": str(error)[:REASON_LENGTH]})
        return
    _answer(connection, {"ready": True})
    own = os.getpid()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        reply = _judge(judges, message)
        if os.getpid() != own:
            os._exit(0)  # a copy that the judge forked, and which came back from it as well: its word does not count
        _answer(connection, reply)


def _fork_guard(connection_fd: int, life_fd: int) -> None:
    if os.fork() == 0:
        os.close(connection_fd)
        os.read(life_fd, 1)
        os.killpg(0, 9)
    os.close(life_fd)


def _silence() -> None:
    """Judges may print what they like; logs are for the run."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _judge(judges: Sequence[tuple[Judge, Mapping[str, Any]]], message: bytes) -> dict[str, Any]:
    try:
        index, response, answer, metadata = pickle.loads(message)
        judge, args = judges[index]
        return _checked(judge(response, answer, metadata, **args))
    except MemoryError:
        return {"kind": "memory", "reason": "the judge went over rewards.memory_mb"}
    except BaseException as error:  # noqa: BLE001  SystemExit too: a judge's end is not the worker's
        frames = traceback.format_exception_only(error)
        return {"kind": "exception", "reason": "".join(frames)[:REASON_LENGTH]}


def _checked(value: Any) -> dict[str, Any]:
    """The scores by name, the judge's own under `score`; or the kind of failure."""
    if value is None:
        return {"kind": "missing", "reason": "the judge returned None"}
    scores = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in scores:
        return {"kind": "invalid", "reason": f"the judge returned a dict without 'score': {sorted(map(str, scores))}"}
    for key, score in scores.items():
        number = score.item() if hasattr(score, "item") else score  # of numpy or torch
        if not isinstance(number, Real) or not math.isfinite(number):
            return {"kind": "invalid", "reason": f"the judge returned {key}={score!r:.100}, expected a finite number"}
        scores[key] = float(number)
    return {"scores": {str(key): score for key, score in scores.items()}}


def _answer(connection: Connection, reply: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
