"""A thread that ends the run when a phase makes no progress, and says which rank is behind, and where."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

EXIT_STATUS = 70
ANSWER_S = 1.5
"""How long ranks that make no progress have to say what they are in the midst of."""
TURN_S = 5.0
"""How long ranks that wait leave the telling to the one that is behind: it may not be able to."""
PACKAGE = f"{os.sep}hybridrl{os.sep}"
COLLECTIVES = os.path.join("torch", "distributed")


class Place(NamedTuple):
    """Where a rank is."""

    passed: int
    """Borders of phases that it has passed."""
    phase: str


class Answer(NamedTuple):
    """What a rank that makes no progress is in the midst of."""

    passed: int
    """Borders of phases that it had passed then."""
    line: str
    """Of this package's code."""
    collective: str | None
    """In which it waits for others; None where it does something of its own."""


class Watchdog:
    """Watches this rank while it is entered; `pass_border` is called at each border of a phase.

    All ranks go through the same phases, so the one that has passed the fewest borders is behind, and the others wait
    for it. Each tells the others, through the world's store, where it is. Of several in one phase those are behind that
    wait in no collective, or do not answer. Those of this machine that do not answer are killed: they may be stopped,
    and torchrun would wait half a minute for them to end by themselves.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._place = Place(0, "start")
        self._since = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # a connection of its own: the world's waits in collectives
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
            self._since = time.monotonic()
            self._store.set(self._key("process"), json.dumps((machine(), os.getpid())))
            self._tell()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None and error is None:
            self._thread.join()

    def pass_border(self, phase: str) -> None:
        """Something began or ended: the rank makes progress. The others are told at once: it may stop here."""
        self._place, self._since = Place(self._place.passed + 1, phase), time.monotonic()
        if self._store is not None:
            with suppress(RuntimeError, dist.DistError):  # it has gone with the rank that held it; the thread sees it
                self._tell()

    def _tell(self) -> None:
        self._store.set(self._key("place"), json.dumps(self._place))

    def _watch(self) -> None:
        assert self._limit_s is not None
        while not self._over.wait(min(1.0, self._limit_s / 4)):
            try:
                late = time.monotonic() - self._since - self._limit_s
                if late > 0:
                    self._store.set(self._key("answer"), json.dumps(answer(self._place.passed)))
                if late > ANSWER_S and self._may_speak(late):
                    self._end()
            except (RuntimeError, dist.DistError):
                return  # the store has gone with the rank that held it: torchrun ends this one

    def _may_speak(self, late: float) -> bool:
        """Whether it is for this rank to say it: it is the first of those behind, or these had their turn."""
        places = self._places()
        return behind(places, self._answers(places))[0] == self._rank or late > TURN_S

    def _places(self) -> dict[int, Place]:
        return {rank: Place(*found) for rank, found in self._told("place").items()} | {self._rank: self._place}

    def _answers(self, places: Mapping[int, Place]) -> dict[int, Answer]:
        found = {rank: Answer(*told) for rank, told in self._told("answer").items()}
        return {rank: one for rank, one in found.items() if one.passed == places[rank].passed}

    def _told(self, what: str) -> dict[int, Any]:
        keys = {rank: self._key(what, rank) for rank in range(self._world)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"watchdog/{what}/{self._rank if rank is None else rank}"

    def _end(self) -> None:
        places = self._places()
        answers = self._answers(places)
        text = stalled(places, answers, self._limit_s or 0.0)
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            began = time.time() - (time.monotonic() - self._since)  # before what ends because of it
            told = {"timestamp": str(int(began)), "py_callstack": text}
            with open(error_file, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": told}}, file)
        self._kill(rank for rank in behind(places, answers) if rank not in answers)
        os._exit(EXIT_STATUS)

    def _kill(self, ranks: Iterable[int]) -> None:
        processes, here = self._told("process"), machine()
        for where, pid in (processes[rank] for rank in ranks if rank != self._rank):
            if where == here:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def machine() -> str:
    """The same for two processes exactly where a process id means the same to both."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def answer(passed: int) -> Answer:
    """Where this process's main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = frame
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    if inner is None or frame is None:
        return Answer(passed, "code of others", None)
    line = f"hybridrl{os.sep}{frame.f_code.co_filename.rpartition(PACKAGE)[2]}:{frame.f_lineno}"
    return Answer(passed, line, inner.f_code.co_name if COLLECTIVES in inner.f_code.co_filename else None)


def behind(places: Mapping[int, Place], answers: Mapping[int, Answer]) -> list[int]:
    """The ranks that the others wait for: the fewest borders passed, and among equals in no collective, if there are
    such."""
    least = min(place.passed for place in places.values())
    ranks = sorted(rank for rank, place in places.items() if place.passed == least)
    return [rank for rank in ranks if rank not in answers or answers[rank].collective is None] or ranks


def stalled(places: Mapping[int, Place], answers: Mapping[int, Answer], limit_s: float) -> str:
    """What to say: who is behind and where, and where the others wait."""

    def told(rank: int) -> str:
        found = answers.get(rank)
        if found is None:
            at = "which does not answer"
        else:
            at = found.line if found.collective is None else f"{found.line}, in {found.collective}"
        return f"rank {rank} in {places[rank].phase} ({at})"

    late = behind(places, answers)
    waiting = [told(rank) for rank in sorted(places) if rank not in late]
    rest = f"; {', '.join(waiting)} waits for it" if waiting else ""
    late_ones = ", ".join(map(told, late))
    return f"StallError: no progress for trainer.stall_timeout_s={limit_s:g} s: {late_ones} is behind{rest}"
