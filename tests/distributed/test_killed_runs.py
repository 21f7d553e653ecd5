"""Whole runs that are killed at random times, lose their launcher, or find the disk full."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from hybridrl.checkpoint.manifest import checkpoints, file_problems, read_manifest
from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH, check_alike, launch, steady
from tests.distributed.test_stop import OPTIONS, start, wait_for_steps
from tests.processes import processes_with

STEPS, KILLS = 16, 5
WORDS = (f"trainer.steps={STEPS}", "checkpoint.every=1", "optimizer.lr=3e-3", "trainer.ranks_per_node=2", BY_LENGTH)

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def made(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_all(folder: Path) -> None:
    """Kills every process of the run, torchrun and judges too, in any order."""
    while left := processes_with(f"HYBRIDRL_TEST_MARK={folder}"):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def whole_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their name; each must be whole."""
    found = []
    for path in checkpoints(folder / "run" / "checkpoints"):
        manifest = read_manifest(path)
        assert file_problems(path, manifest.files, manifest.files) == []
        found.append(manifest.step)
    return found


def test_a_run_that_is_killed_again_and_again_is_the_one_that_never_was(pool: WorkerPool, tmp_path: Path) -> None:
    launch(pool, tmp_path / "straight", *WORDS, every=1, small=OPTIONS)
    rng, killed, newest = random.Random(4), tmp_path / "killed", 0
    killed.mkdir()
    for _ in range(KILLS):
        run = start(killed, *WORDS)
        wait_for_steps(killed, min(max(made(killed), newest) + 1, STEPS - 1))
        time.sleep(rng.uniform(0.0, 0.8))
        kill_all(killed)
        run.communicate()
        steps = whole_steps(killed)
        assert steps == [] or steps[-1] >= newest
        newest = max([newest, *steps])
    run = start(killed, *WORDS)
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 0, errors[-3000:]
    runs = killed / "run", tmp_path / "straight"
    ours, theirs = (steady(read_metrics(folder / "metrics.jsonl")) for folder in runs)
    assert ours == theirs
    check_alike(*runs)


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    run = start(tmp_path, "trainer.steps=5000")
    wait_for_steps(tmp_path, 1)
    run.send_signal(signal.SIGKILL)
    ended = time.monotonic()
    run.communicate(timeout=120)  # until nobody has its end of the pipe
    while processes_with(f"HYBRIDRL_TEST_MARK={tmp_path}"):
        assert time.monotonic() - ended < 60
        time.sleep(0.1)
    assert time.monotonic() - ended < 60
    assert whole_steps(tmp_path) == [made(tmp_path)]


def test_a_run_on_a_full_disk_ends_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    words = ("checkpoint.every=1", "checkpoint.retries=1", "checkpoint.retry_wait_s=0.1")
    run = start(tmp_path, *words, "trainer.steps=2", "trainer.export_final=false")
    assert run.communicate(timeout=200)[1] is not None
    assert run.returncode == 0
    full = ("bash", "-c", 'ulimit -S -f 400; exec "$@"', "bash")
    run = start(tmp_path, *words, "trainer.steps=4", before=full)
    errors = run.communicate(timeout=200)[1]
    assert run.returncode not in (0, None)
    last = [line for line in errors.splitlines() if "Error:" in line][-1]
    assert "File too large" in last, errors[-3000:]
    assert "bytes to write" in last
    assert "the checkpoint of step 3 could not be written" in errors
    assert whole_steps(tmp_path) == [1, 2]
    run = start(tmp_path, *words, "trainer.steps=4")
    errors = run.communicate(timeout=200)[1]
    assert run.returncode == 0, errors[-3000:]
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert whole_steps(tmp_path) == [3, 4]


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    runs = [start(folder, "trainer.steps=3", "checkpoint.every=1") for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        errors = run.communicate(timeout=300)[1]
        assert run.returncode == 0, errors[-3000:]
        assert whole_steps(folder) == [2, 3]
    ours, theirs = (steady(read_metrics(folder / "run" / "metrics.jsonl")) for folder in folders)
    assert ours == theirs
