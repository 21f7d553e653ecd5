"""Judges that misbehave, for the pool's tests; the response says how."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def obey(response: str, answer: str | None, metadata: Mapping[str, Any], *, scale: float = 1.0) -> Any:
    """Does what the response names; text without a command is scored by its length."""
    command, _, argument = response.partition(":")
    if command not in COMMANDS:
        return scale * len(response)
    return COMMANDS[command](argument)


def fifth(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """A second judge, which never fails."""
    return 0.2


def _hang(argument: str) -> None:
    while True:
        time.sleep(60)


def _hold_lock(argument: str) -> int:
    return len(str(3 ** (3**18)))


def _fork_and_hang(argument: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(argument).write_text(str(child.pid), encoding="utf-8")
    _hang("")


def _fork_and_return(argument: str) -> float:
    """Both processes come back to the worker."""
    return 1.0 if os.fork() else 0.25


def _ignore_termination(argument: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _hang("")


def _raise(argument: str) -> None:
    raise ZeroDivisionError(argument)


def _exit(argument: str) -> None:
    sys.exit(0)


def _leave_bomb(argument: str) -> float:
    threading.Timer(float(argument), os._exit, [0]).start()
    return 1.0


def _sleep(argument: str) -> float:
    time.sleep(float(argument))
    return 1.0


def _print(argument: str) -> float:
    for _ in range(1000):
        sys.stdout.write("x" * 10_000)
        sys.stderr.write("x" * 10_000)
    return 1.0


COMMANDS = {
    "hang": _hang,
    "hold_lock": _hold_lock,
    "fork_and_hang": _fork_and_hang,
    "fork_and_return": _fork_and_return,
    "ignore_termination": _ignore_termination,
    "kill_group": lambda argument: os.killpg(0, signal.SIGTERM),
    "close_all": lambda argument: os.closerange(0, 65536),
    "raise": _raise,
    "sys_exit": _exit,
    "os_exit": lambda argument: os._exit(0),
    "segfault": lambda argument: ctypes.string_at(0),
    "memory": lambda argument: len(bytearray(int(argument))),
    "none": lambda argument: None,
    "nan": lambda argument: float("nan"),
    "text": lambda argument: "1.0",
    "dict": lambda argument: {"score": 0.5, "format": 1},
    "no_score": lambda argument: {"format": 1},
    "true": lambda argument: True,
    "numpy": lambda argument: {"score": np.bool_(True), "part": np.float32(0.5)},
    "bomb": _leave_bomb,
    "sleep": _sleep,
    "print": _print,
    "modules": lambda argument: {"score": float("torch" in sys.modules)},
    "pid": lambda argument: os.getpid(),
}
