"""A thread that ends the run when a phase makes no progress, and says which rank is behind, and where."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

EXIT_STATUS = 70
TURN_S = 5.0
"""How long ranks that wait leave the telling to the one that is behind: it may not be able to."""


class Place(NamedTuple):
    """Where a rank is."""

    passed: int
    """Borders of phases that it has passed."""
    phase: str


class Watchdog:
    """Watches this rank while it is entered; `pass_border` is called at each border of a phase.

    All ranks go through the same phases, so the one that has passed the fewest borders is behind, and the others wait
    for it. Each tells the others, through the world's store, where it is.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._place = Place(0, "start")
        self._since = time.monotonic()
        self._told: Place | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # a connection of its own: the world's waits in collectives
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
            self._since = time.monotonic()
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
        """Something began or ended: the rank makes progress."""
        self._place, self._since = Place(self._place.passed + 1, phase), time.monotonic()

    def _watch(self) -> None:
        assert self._limit_s is not None
        while not self._over.wait(min(1.0, self._limit_s / 4)):
            try:
                self._tell()
                late = time.monotonic() - self._since - self._limit_s
                if late > 0 and self._may_speak(late):
                    self._end()
            except (RuntimeError, dist.DistError):
                return  # the store has gone with the rank that held it: torchrun ends this one

    def _tell(self) -> None:
        if self._told != self._place:
            self._told = self._place
            self._store.set(f"watchdog/{self._rank}", json.dumps(self._told))

    def _may_speak(self, late: float) -> bool:
        """Whether it is for this rank to say it: it is the first of those behind, or these had their turn."""
        places = self._places()
        first = min(places, key=lambda rank: (places[rank].passed, rank))
        return first == self._rank or late > TURN_S

    def _places(self) -> dict[int, Place]:
        keys = [f"watchdog/{rank}" for rank in range(self._world)]
        found = {r: Place(*json.loads(self._store.get(k))) for r, k in enumerate(keys) if self._store.check([k])}
        return found | {self._rank: self._place}

    def _end(self) -> None:
        text = stalled(self._places(), self._limit_s or 0.0)
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            told = {"timestamp": str(int(time.time())), "py_callstack": text}
            with open(error_file, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": told}}, file)
        os._exit(EXIT_STATUS)


def stalled(places: Mapping[int, Place], limit_s: float) -> str:
    """What to say: who is behind and where, and where the others wait."""
    least = min(place.passed for place in places.values())
    behind = [f"rank {rank} in {place.phase}" for rank, place in places.items() if place.passed == least]
    waiting = [f"rank {rank} in {place.phase}" for rank, place in places.items() if place.passed > least]
    rest = f"; {', '.join(waiting)} waits for it" if waiting else ""
    return f"StallError: no progress for trainer.stall_timeout_s={limit_s:g} s: {', '.join(behind)} is behind{rest}"
