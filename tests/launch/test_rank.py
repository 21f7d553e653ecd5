"""A rank as a child process: its environment, its end and its error, without Ray."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.launch.rank import PORT_RANGE, End, Rank, environment, first_failure, free_port
from tests.processes import left_of

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
    before = int(time.time())  # it says its time in whole seconds
    rank = alone("fail", rank=1)
    rank.output.read()
    end = rank.wait()
    assert end.code == 1
    assert "rank 1 is broken on purpose" in end.error
    assert before <= end.at <= time.time()


def test_a_rank_can_be_ended_at_once() -> None:
    rank = alone("fail")
    rank.kill()
    assert rank.wait().code == -9


def test_a_free_port_is_none_that_the_kernel_gives_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    assert 10_000 <= port < int(PORT_RANGE.read_text().split()[0])
    (tmp_path / "range").write_text(f"{port + 1} 60000")
    monkeypatch.setattr("hybridrl.launch.rank.PORT_RANGE", tmp_path / "range")
    monkeypatch.setattr("hybridrl.launch.rank.FIRST_PORT", port)
    with socket.socket() as taken:
        taken.bind(("", port))
        with pytest.raises(OSError, match=f"from {port} to {port}"):
            free_port()
    assert free_port() == port


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
    assert left_of([pid]) == []
