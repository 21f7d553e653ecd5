"""What a watchdog does to a rank that does not answer."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hybridrl.parallel.watchdog import Watchdog, machine


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing more."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def watchdog(where: str, pid: int) -> Watchdog:
    """Of rank 0 of 2; rank 1 is that process."""
    found = Watchdog(1.0)
    found._store, found._rank, found._world = dist.HashStore(), 0, 2
    found._store.set("watchdog/process/1", json.dumps((where, pid)))
    return found


def test_a_rank_that_is_stopped_is_killed(stopped: subprocess.Popen[bytes]) -> None:
    watchdog(machine(), stopped.pid)._kill([1])
    assert stopped.wait(60) == -signal.SIGKILL


def test_a_rank_of_another_machine_is_left_to_its_torchrun(stopped: subprocess.Popen[bytes]) -> None:
    watchdog("another", stopped.pid)._kill([1])
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(1)
