"""A rank as a child process: its environment, its end and its error, without Ray."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridrl.launch.rank import End, Rank, environment, first_failure

ROOT = str(Path(__file__).resolve().parent.parent.parent)


def alone(what: str, rank: int = 0) -> Rank:
    env = environment(rank=rank, local_rank=rank, world=2, local_world=2, address="127.0.0.1", port=1)
    return Rank("tests.launch.ranks", [what], env, ROOT)


def test_a_rank_tells_its_output_and_its_good_end() -> None:
    rank = alone("nothing")
    assert "rank 0 of 2 does nothing" in rank.output.read()
    end = rank.wait()
    assert (end.code, end.error, end.failed) == (0, "", False)


def test_a_rank_that_raises_leaves_its_traceback() -> None:
    rank = alone("fail", rank=1)
    rank.output.read()
    end = rank.wait()
    assert end.code == 1
    assert "rank 1 is broken on purpose" in end.error
    assert end.at > time.time() - 120


def test_a_rank_can_be_ended_at_once() -> None:
    rank = alone("fail")
    rank.kill()
    assert rank.wait().code == -9


def test_ranks_are_numbered_as_torchrun_numbers_them() -> None:
    env = environment(rank=11, local_rank=3, world=16, local_world=8, address="10.0.0.1", port=29500)
    assert env["GROUP_RANK"] == "1"
    assert (env["RANK"], env["LOCAL_RANK"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("11", "3", "10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([End(0, 1, "late", 20.0), End(3, 1, "early", 10.0)], 3),
        ([End(2, 1, "same", 10.0), End(1, 1, "same", 10.0)], 1),
        ([End(0, -9), End(3, 1, "told", 10.0)], 3),
        ([End(0, 0), End(1, -9)], 1),
    ],
)
def test_the_first_failure_is_the_earliest_that_is_told(ends: list[End], first: int) -> None:
    assert first_failure(ends).rank == first


def test_a_rank_ends_when_its_starter_is_killed() -> None:
    code = (
        "from tests.launch.test_rank import alone; import time; r = alone('fail'); print(r.process.pid, flush=True); "
        "time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert starter.stdout is not None
    with starter.stdout as output:
        pid = int(output.readline())
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
