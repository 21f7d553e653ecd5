"""A process that is killed while it saves leaves a whole checkpoint, and the next one goes on from it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def killed(way: str, folder: Path, number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.checkpoint.killed_saves", way, str(folder), str(number)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_save_may_be_killed_at_any_touch_of_the_file_system(tmp_path: Path, stride: int) -> None:
    told = killed("touches", tmp_path, stride)
    assert told["places"] > 25
    assert told["problems"] == {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("runs", [3, pytest.param(45, marks=pytest.mark.full)])
def test_a_save_may_be_killed_at_any_time(tmp_path: Path, runs: int) -> None:
    told = killed("times", tmp_path, runs)
    assert told["problems"] == {}
    assert runs < 10 or told["newest"] > 10
