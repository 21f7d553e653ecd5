"""A rank that fails ends the run on all ranks, soon, with its own error as torchrun's last word and no process left."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.checkpoint.manifest import checkpoints, file_problems, read_manifest
from tests.distributed.failing_run import EXIT_STATUS, PHASES, Failure
from tests.processes import left_with

STALL_S = 20
SOON_S = 120
"""Much less than the ten minutes for which a collective waits, on a machine that is busy too."""
STEPS = 4
OPTIONS = (
    "recipe=grpo_tiny_moe",
    "warm_start.steps=0",
    f"trainer.steps={STEPS}",
    "trainer.prompts_per_step=4",
    "rollout.n=4",
    "rewards.workers=1",
    "checkpoint.every=1",
    "checkpoint.keep_last=2",
)
REPOSITORY = Path(__file__).parents[2]
HANGS = ("sleep", "SIGSTOP")
ASKED = ("SIGTERM", "SIGINT")
KINDS = ("exception", "exit", "SIGKILL", *HANGS, *ASKED)
TIMED = {phase: phase for phase in ("sync", "rollout", "reward", "logprob", "update")} | {"data": "rollout"}
"""Where the watchdog says that a rank is which hangs in a phase."""


def random_failure(seed: int) -> Failure:
    """Any phase, rank and way; not those after which a run ends well, or that nothing watches over yet."""
    rng = random.Random(seed)
    kind, phase = rng.choice(KINDS), rng.choice([p for p in PHASES if p not in ("start", "export")])
    if kind in ("exception", "exit", "SIGKILL") and rng.random() < 0.2:
        phase = rng.choice(("start", "export"))
    last = STEPS - 1 if kind in ASKED else STEPS  # asked to end in the last step, a run ends well
    count = 1 if phase in ("start", "export") else rng.randint(1, last)
    return Failure(phase=phase, kind=kind, rank=rng.randrange(2), count=count)


def safe(failure: Failure) -> int:
    """The step that is saved for certain, whatever happens at that failure."""
    if failure.phase in ("start", "commit"):
        return 0
    if failure.phase == "export":
        return STEPS
    if failure.kind in ASKED and failure.phase != "save":
        return failure.count
    return failure.count - (1 if failure.phase == "save" else 2)


def check_words(failure: Failure, errors: str) -> None:
    """What a person sees last is what happened first."""
    last = [line for line in errors.splitlines() if "Error:" in line and "ChildFailedError" not in line]
    if failure.kind == "exception":
        assert last[-1].endswith(f"RuntimeError: this rank is broken in {failure.phase}")
    elif failure.kind in HANGS:
        where = TIMED.get(failure.phase)
        assert "StallError: no progress for" in last[-1]
        assert where is None or re.search(rf"rank {failure.rank} in {where} \([^)]*\) is behind", last[-1])
    else:
        told = errors[errors.rindex("Root Cause") :]
        numbers = {key: int(value) for key, value in re.findall(r"(rank|exitcode) +: (-?\d+)", told)}
        expected = {"exit": EXIT_STATUS, "SIGKILL": -signal.SIGKILL}.get(failure.kind)
        if expected is not None:
            assert numbers == {"rank": failure.rank, "exitcode": expected}
        else:
            assert numbers["exitcode"] == 128 + getattr(signal, failure.kind)
            assert last == []


def check_checkpoints(folder: Path, least: int) -> None:
    """Every one that has its name is whole, and the newest is not older than it may be."""
    steps = [0]
    for path in checkpoints(folder):
        manifest = read_manifest(path)
        assert file_problems(path, manifest.files, manifest.files) == []
        steps.append(manifest.step)
    assert steps[-1] >= least


@pytest.mark.parametrize(
    "failure",
    [
        Failure("rollout", count=3),
        Failure("update", "SIGKILL", rank=0, count=2),
        pytest.param(Failure("rollout", "SIGSTOP", rank=0, count=2), marks=pytest.mark.full),
        *(
            pytest.param(Failure(phase), marks=pytest.mark.full)
            for phase in ("start", "sync", "reward", "save", "export")
        ),
        *(pytest.param(random_failure(seed), marks=pytest.mark.full) for seed in range(20)),
    ],
    ids=lambda failure: f"{failure.kind} in {failure.count}. {failure.phase} of rank {failure.rank}",
)
def test_a_run_ends_soon_and_says_what_failed_first(tmp_path: Path, failure: Failure) -> None:
    told = tmp_path / "told"
    mark = f"HYBRIDRL_TEST_MARK={tmp_path}"
    failure = Failure(failure.phase, failure.kind, failure.rank, failure.count, str(told))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*OPTIONS, f"trainer.output_dir={tmp_path / 'run'}"]
    if failure.kind in HANGS:
        words.append(f"trainer.stall_timeout_s={STALL_S}")
    ended = subprocess.run(
        [*torchrun, "-m", "tests.distributed.failing_run", *words],
        env={**os.environ, "FAIL": failure.text, "HYBRIDRL_TEST_MARK": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    seconds = time.time() - float(told.read_text())
    print(f"ended {seconds:.1f} s after the failure, status {ended.returncode}")
    assert left_with(mark) == []
    assert ended.returncode not in (0, None)
    assert seconds < SOON_S + (STALL_S if failure.kind in HANGS else 0)
    check_words(failure, ended.stderr)
    check_checkpoints(tmp_path / "run" / "checkpoints", safe(failure))
