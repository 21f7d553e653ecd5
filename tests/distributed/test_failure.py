"""A rank that fails ends the run on all ranks, soon, with its own error as torchrun's last word and no process left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.failing_run import PHASES

OPTIONS = (
    "recipe=grpo_tiny_moe",
    "warm_start.steps=0",
    "trainer.steps=1",
    "trainer.prompts_per_step=4",
    "rollout.n=4",
    "rewards.workers=1",
)
REPOSITORY = Path(__file__).parents[2]


def processes_with(mark: str) -> list[int]:
    """Ids of the processes whose environment holds this text; the judges' workers inherit it."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # another user's, or gone
            continue
    return found


@pytest.mark.parametrize(
    "phase", ["rollout", *(pytest.param(p, marks=pytest.mark.full) for p in PHASES if p != "rollout")]
)
def test_the_error_of_the_rank_that_failed_first_is_told_last(tmp_path: Path, phase: str) -> None:
    mark = f"HYBRIDRL_TEST_MARK={tmp_path}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = time.monotonic()
    ended = subprocess.run(
        [*torchrun, "-m", "tests.distributed.failing_run", *OPTIONS, f"trainer.output_dir={tmp_path / 'run'}"],
        env={**os.environ, "FAIL_PHASE": phase, "HYBRIDRL_TEST_MARK": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode not in (0, None)
    assert time.monotonic() - started < 120  # start-up included
    errors = [line for line in ended.stderr.splitlines() if "Error:" in line]
    assert errors[-1].endswith(f"RuntimeError: this rank is broken in {phase}"), ended.stderr[-3000:]
    assert processes_with(mark) == []
