"""One rank as a child process with torchrun's environment, whose end and whose error are known. Pure of Ray."""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FIRST_PORT = 10_000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that the kernel chooses from, for connections too; those below are chosen on purpose alone."""
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True)
class End:
    """How a rank's process ended."""

    rank: int
    code: int
    """Exit status; negative: the signal that ended it."""
    error: str = ""
    """The traceback that it left, empty where it left none."""
    at: float = 0.0
    """When it failed, in seconds since 1970; 0 where it did not say."""

    @property
    def failed(self) -> bool:
        return self.code != 0


def environment(*, rank: int, local_rank: int, world: int, local_world: int, address: str, port: int) -> dict[str, str]:
    """What torchrun would set for this rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rank // local_world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def free_port() -> int:
    """A port that nobody uses now, and that the kernel gives to nobody who asks it for any, so that it stays free.

    Raises OSError where none is found.
    """
    end = max(FIRST_PORT + 1, int(PORT_RANGE.read_text().split()[0]))
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", random.SystemRandom().randrange(FIRST_PORT, end)))
            return int(probe.getsockname()[1])
    raise OSError(f"no port was free at 100 tries from {FIRST_PORT} to {end - 1}")


class Rank:
    """A running rank: `python -m MODULE ARGUMENTS` in a session of its own, which ends when its starter does."""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str], folder: str) -> None:
        """Starts it in `folder`, which relative paths of the configuration count from."""
        self.rank = int(env["RANK"])
        self._folder = tempfile.TemporaryDirectory(prefix="hybridrl-rank-")
        own = Path(self._folder.name) / "rank"  # torchrun's ranks lie side by side, and look for each other's errors
        own.mkdir()
        self._error_file = own / "error.json"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env={**os.environ, **env, "TORCHELASTIC_ERROR_FILE": str(self._error_file), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def output(self) -> IO[str]:
        """Its stdout and stderr."""
        assert self.process.stdout is not None
        return self.process.stdout

    def wait(self) -> End:
        """Waits for its end."""
        code = self.process.wait()
        self.output.close()
        error, at = self._error()
        self._folder.cleanup()
        return End(self.rank, code, error, at)

    def ask_to_end(self) -> None:
        """Asks it to save and end, as a scheduler does before it takes a node away."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _error(self) -> tuple[str, float]:
        """What `hybridrl.parallel.failure` or torch's recorder left in the error file."""
        try:
            message = json.loads(self._error_file.read_text(encoding="utf-8"))["message"]
        except (OSError, ValueError, KeyError):
            return "", 0.0
        if isinstance(message, str):
            return message, 0.0
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack", message.get("message", ""))), float(extra.get("timestamp", 0))


def first_failure(ends: Sequence[End]) -> End:
    """The one that came first: by its own clock, and where clocks are equal or silent, by rank; told ones before."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (not end.error, end.at, end.rank))


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL)
