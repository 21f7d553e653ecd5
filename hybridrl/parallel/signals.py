"""SIGTERM and Ctrl-C: the run is asked to end at its next safe point, and ends after its grace in any case."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

HANDLED = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1
IMPATIENT_S = 2.0
"""A second Ctrl-C after so long ends the run at once; torchrun passes on the first one, which is no second."""


class Stopped(SystemExit):
    """The run ended because it was asked to; its exit status is 128 + the signal, as a shell has it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class StopSignals:
    """Takes the signals while it is entered, in the main thread; elsewhere nobody sends any and it does nothing.

    torchrun sends SIGTERM, too, when another rank has failed. No safe point will come then, so this rank ends at once,
    without a word: the other one's error is what counts.
    """

    current: "StopSignals | None" = None

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._before: dict[int, Any] = {}
        self._at = 0.0
        self.number: int | None = None
        """The signal that came."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in HANDLED}
            StopSignals.current = self
            _follow_launcher()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:
            StopSignals.current = None  # after an error it still tells `recorded` why

    def agreed(self, device: torch.device) -> int | None:
        """The signal that any rank has got, on every rank. Collective."""
        found = torch.tensor([self.number or 0], dtype=torch.int32, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found.item()) or None

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and another_failed():
            os._exit(128 + number)
        if self.number is not None:
            if number == signal.SIGINT and time.monotonic() - self._at > IMPATIENT_S:
                raise KeyboardInterrupt
            return
        self.number, self._at = number, time.monotonic()
        timer = threading.Timer(self._grace_s, self._too_late)
        timer.daemon = True
        timer.start()

    def _too_late(self) -> None:
        if self.number is None or StopSignals.current is not self:
            return
        print(
            f"{signal.Signals(self.number).name}: no safe point within checkpoint.grace_s={self._grace_s:g} s; the run "
            "ends now, and its newest whole checkpoint is what it was",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + self.number)


def _follow_launcher() -> None:
    """Has the kernel send SIGTERM when torchrun, which started this rank, has ended: nobody else would end it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def another_failed() -> bool:
    """Whether torchrun has been told an error of another rank of this node."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own:
        return False
    return any(path != Path(own) for path in Path(own).parent.parent.glob("*/error.json"))
