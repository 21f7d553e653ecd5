"""A run that is told to end saves its step first; one whose rank hangs says which; torchrun's restart goes on."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridrl.checkpoint.files import with_retries
from hybridrl.checkpoint.manifest import checkpoints, read_manifest
from hybridrl.parallel.watchdog import Answer, Place, answer, behind, stalled
from hybridrl.telemetry.metrics import read_metrics
from tests.processes import left_with, processes_with

REPOSITORY = Path(__file__).parents[2]
OPTIONS = (
    "recipe=grpo_tiny_moe",
    "warm_start.steps=0",
    "trainer.prompts_per_step=4",
    "rollout.n=4",
    "rewards.workers=1",
)


def start(
    folder: Path, *words: str, torchrun: tuple[str, ...] = (), before: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """A run of two ranks; `before` is a command that runs the rest of its words."""
    command = [*before, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, *torchrun, "-m", "hybridrl.train", *OPTIONS, f"trainer.output_dir={folder / 'run'}", *words],
        env={**os.environ, "HYBRIDRL_TEST_MARK": str(folder), "PYTHONPATH": str(REPOSITORY)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(folder: Path, count: int) -> None:
    path, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 250
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)


def test_a_run_that_is_told_to_end_saves_its_step(tmp_path: Path) -> None:
    run = start(tmp_path, "trainer.steps=5000")
    wait_for_steps(tmp_path, 1)
    run.send_signal(signal.SIGTERM)
    errors = run.communicate(timeout=120)[1]  # it would go on for thousands of steps
    assert run.returncode not in (0, None), errors
    (saved,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert read_manifest(saved).step == len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert left_with(f"HYBRIDRL_TEST_MARK={tmp_path}") == []


@pytest.mark.full
def test_a_killed_rank_is_started_again_and_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, "trainer.steps=60", "checkpoint.every=1", torchrun=("--max-restarts", "1"))
    wait_for_steps(tmp_path, 3)
    ranks = [pid for pid in processes_with(f"HYBRIDRL_TEST_MARK={tmp_path}") if _rank(pid) == "1"]
    os.kill(ranks[0], signal.SIGKILL)
    errors = run.communicate(timeout=280)[1]
    assert run.returncode == 0, errors[-3000:]
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 61))


def _rank(pid: int) -> str | None:
    """RANK of a training process; None for the judges' workers, which have it in their environment, too."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [v.partition(b"=")[2].decode() for v in variables if v.startswith(b"RANK=")]
    return found[0] if found and b"hybridrl.train" in words else None


def test_the_rank_that_is_behind_is_named() -> None:
    places = {0: Place(9, "reward"), 1: Place(8, "rollout"), 2: Place(9, "reward")}
    text = stalled(places, {}, 60.0)
    assert "rank 1 in rollout (which does not answer) is behind" in text
    assert "rank 0 in reward (which does not answer), rank 2 in reward (which does not answer) waits for it" in text


def test_of_ranks_in_one_phase_those_are_behind_that_wait_in_no_collective() -> None:
    places = {rank: Place(4, "update") for rank in range(3)}
    waits, works = Answer(4, "hybridrl/a.py:1", "all_reduce"), Answer(4, "hybridrl/b.py:2", None)
    assert behind(places, {0: waits, 1: works, 2: waits}) == [1]
    assert behind(places, {0: waits, 2: waits}) == [1]  # it is stopped, or holds the interpreter
    assert behind(places, {0: waits, 1: waits, 2: waits}) == [0, 1, 2]
    text = stalled(places, {0: waits, 1: works, 2: waits}, 60.0)
    assert "rank 1 in update (hybridrl/b.py:2) is behind; rank 0 in update (hybridrl/a.py:1, in all_reduce), " in text


def test_an_answer_says_where_the_main_thread_is() -> None:
    found: list[Answer] = []

    def attempt() -> None:
        """Waits, called there, for another thread's answer."""
        with ThreadPoolExecutor(1) as threads:
            found.append(threads.submit(answer, 7).result())

    with_retries(attempt, 0, 0.0, lambda _: None)
    assert found[0]._replace(line="") == Answer(7, "", None)
    assert found[0].line.startswith("hybridrl/checkpoint/files.py:")
