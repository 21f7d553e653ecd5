"""A process that is killed while it saves leaves a whole checkpoint, and the next one goes on from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_save_may_be_killed_at_any_touch_of_the_file_system(tmp_path: Path, stride: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killed_saves", str(tmp_path), str(stride)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["places"] > 25
    assert told["problems"] == {}
