"""Worker processes that judge, and that nothing a judge does can hurt for long.

Each job has a time limit after which its process is killed, with all that it started, and replaced; all jobs of a call
have a common one. Workers are fresh interpreters: they import neither the trainer's main module nor torch, share no
locks with it, and are neither forked from it nor daemons of `multiprocessing`. They end with the trainer, even if it is
killed (see `hybridrl.rewards.worker`). The pool may be used from any thread, by one call at a time.

This is no sandbox. A judge may read files, the environment and the network; do not let it execute a model's code.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

START_S = 120.0
"""A worker imports its judges within this time."""
_POLL_S = 0.2
"""How long the end of a worker whose children hold its pipe open can stay unseen."""
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class Job:
    """One call of one judge."""

    judge: int
    """Index into the pool's judges."""
    response: str
    answer: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What came of a job: scores, or the kind of failure and its reason."""

    scores: Mapping[str, float] | None
    """The judge's score under `score`, further numbers under their names."""
    kind: str = ""
    """`timeout`, `batch_timeout`, `died`, `memory`, `exception`, `missing`, `invalid`, `unsendable` or `no_worker`."""
    reason: str = ""


class Worker:
    """One process, starting, idle or busy with a job."""

    def __init__(self, setup: bytes) -> None:
        life, self._life = os.pipe()  # the worker's guard reads; the write end stays open here alone
        self.connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-P", "-m", "hybridrl.rewards.worker", str(theirs.fileno()), str(life)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(), life),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(life)
        self.job: int | None = None
        self.ready = False
        self.used = False
        """It has judged before, so its state may be an earlier judge's doing."""
        self.deadline = time.monotonic() + START_S
        with contextlib.suppress(OSError):  # it died at once: `alive` will tell
            self.connection.send_bytes(setup)

    def assign(self, job: int, message: bytes, limit_s: float) -> None:
        """Gives it a job; its clock starts."""
        self.job = job
        self.deadline = time.monotonic() + limit_s
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> dict[str, Any] | None:
        """Its next message if there is one; None also after its end."""
        try:
            if self.connection.poll():
                reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
                return reply
        except (EOFError, OSError, ValueError):
            self.kill()
        return None

    def kill(self) -> None:
        """Ends it and everything in its process group, and waits for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if not self.connection.closed:
            self.connection.close()
            os.close(self._life)

    @property
    def alive(self) -> bool:
        return not self.connection.closed and self.process.poll() is None


class Pool(ABC):
    """Judges, wherever they run; started and closed as a context manager."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Starts the workers. Raises ValueError where a judge is refused."""

    @abstractmethod
    def close(self) -> None:
        """Ends them."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """A verdict a job, in order."""


class JudgePool(Pool):
    """`size` workers that each know the same judges, given as (name, args)."""

    def __init__(
        self,
        judges: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        size: int,
        timeout_s: float,
        batch_timeout_s: float,
        memory_mb: int,
    ) -> None:
        self._setup = pickle.dumps({"judges": [(name, dict(args)) for name, args in judges], "memory_mb": memory_mb})
        self._size = size
        self._timeout_s = timeout_s
        self._batch_timeout_s = batch_timeout_s
        self._workers: list[Worker] = []
        self._failed_starts = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the workers and waits until they have their judges. Raises ValueError if a judge is refused."""
        with self._lock:
            self._workers = [Worker(self._setup) for _ in range(self._size)]
            try:
                self._await_ready()
            except BaseException:
                self._kill_all()
                raise

    def _await_ready(self) -> None:
        while not all(worker.ready for worker in self._workers):
            wait([worker.connection for worker in self._workers], timeout=_POLL_S)
            for worker in self._workers:
                reply = worker.receive() or {}
                worker.ready = worker.ready or "ready" in reply
                if "refused" in reply:
                    raise ValueError(reply["refused"])
                if not worker.alive or (not worker.ready and time.monotonic() > worker.deadline):
                    raise RuntimeError(
                        f"a judge worker did not start within {START_S:g} s (exit code {worker.process.poll()}); "
                        f"try `{sys.executable} -m hybridrl.rewards.worker` for the reason"
                    )

    def close(self) -> None:
        """Ends the workers."""
        with self._lock:
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    @property
    def pids(self) -> list[int]:
        """Of the workers there are now."""
        return [worker.process.pid for worker in self._workers]

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict a job, in order, within the batch's time limit. Raises RuntimeError if the pool is closed."""
        with self._lock:
            if not self._workers:
                raise RuntimeError("the judge pool is closed: enter it (`with pool:`) before judging")
            return _Batch(self, jobs).run()


class _Batch:
    """One call of `run`: which jobs wait, which are done."""

    def __init__(self, pool: JudgePool, jobs: Sequence[Job]) -> None:
        self._pool = pool
        self._jobs = jobs
        self._waiting = deque(range(len(jobs)))
        self._verdicts: dict[int, Verdict] = {}
        self._retried: set[int] = set()
        self._deadline = time.monotonic() + pool._batch_timeout_s

    def run(self) -> list[Verdict]:
        self._pool._failed_starts = 0
        while len(self._verdicts) < len(self._jobs):
            for slot in range(self._pool._size):
                self._advance(slot)
            if time.monotonic() > self._deadline:
                self._give_up("batch_timeout", "rewards.batch_timeout_s was over")
            elif self._pool._failed_starts >= _MAX_FAILED_STARTS:
                self._give_up("no_worker", f"judge workers failed to start {_MAX_FAILED_STARTS} times in a row")
            elif len(self._verdicts) < len(self._jobs):
                self._sleep()
        return [self._verdicts[index] for index in range(len(self._jobs))]

    def _advance(self, slot: int) -> None:
        """Takes in what a worker says, replaces it if it must be, and gives it work."""
        worker = self._pool._workers[slot]
        reply = worker.receive()
        if reply is not None:
            self._take(worker, reply)
        overdue = (worker.job is not None or not worker.ready) and time.monotonic() > worker.deadline
        if overdue or not worker.alive:
            self._bury(worker, overdue)
            worker = self._pool._workers[slot] = Worker(self._pool._setup)
        if worker.ready and worker.job is None and self._waiting:
            self._assign(worker)

    def _take(self, worker: Worker, reply: dict[str, Any]) -> None:
        if "ready" in reply:
            worker.ready = True
            self._pool._failed_starts = 0
        elif worker.job is not None:
            verdict = Verdict(scores=reply.get("scores"), kind=reply.get("kind", ""), reason=reply.get("reason", ""))
            if verdict.kind == "memory":
                worker.kill()  # the next job gets a process whose heap is whole
                self._fail_or_retry(worker, verdict)
            else:
                self._verdicts[worker.job] = verdict
            worker.job = None
            worker.used = True

    def _bury(self, worker: Worker, overdue: bool) -> None:
        if not overdue and (last := worker.receive()) is not None:  # it answered and ended
            self._take(worker, last)
        worker.kill()
        if not worker.ready:
            self._pool._failed_starts += 1
        if worker.job is None:
            return
        if overdue:
            limit = f"killed after rewards.timeout_s={self._pool._timeout_s:g}"
            self._verdicts[worker.job] = Verdict(None, "timeout", limit)
        else:
            code = worker.process.returncode
            self._fail_or_retry(worker, Verdict(None, "died", f"the judge ended its process, exit code {code}"))
        worker.job = None

    def _fail_or_retry(self, worker: Worker, verdict: Verdict) -> None:
        """A job gets a second try where its worker may have died of what an earlier job left behind."""
        job = worker.job
        if job is None:
            return
        if worker.used and job not in self._retried:
            self._retried.add(job)
            self._waiting.appendleft(job)
        else:
            self._verdicts[job] = verdict

    def _assign(self, worker: Worker) -> None:
        while self._waiting:
            index = self._waiting.popleft()
            job = self._jobs[index]
            try:
                message = pickle.dumps((job.judge, job.response, job.answer, dict(job.metadata)))
            except Exception as error:  # noqa: BLE001  pickling runs the metadata's own code
                self._verdicts[index] = Verdict(None, "unsendable", f"metadata cannot be pickled: {error}")
                continue
            worker.assign(index, message, self._pool._timeout_s)
            return

    def _sleep(self) -> None:
        workers = self._pool._workers
        deadlines = [worker.deadline for worker in workers if worker.job is not None]
        pause = min([_POLL_S, *(deadline - time.monotonic() for deadline in [*deadlines, self._deadline])])
        connections: list[Connection] = [worker.connection for worker in workers if worker.alive]
        if connections:
            wait(connections, timeout=max(0.0, pause))

    def _give_up(self, kind: str, reason: str) -> None:
        """Fails what is not judged. Workers that still judge are killed, their successors start for the next call."""
        for slot, worker in enumerate(self._pool._workers):
            if worker.job is not None:
                worker.kill()
                self._pool._workers[slot] = Worker(self._pool._setup)
        self._waiting.clear()
        for index in range(len(self._jobs)):
            self._verdicts.setdefault(index, Verdict(None, kind, reason))
