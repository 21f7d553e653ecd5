"""Several machines, by the lines of the README: here two launchers of one rank each, which meet at an endpoint."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hybridrl.launch.rank import free_port
from tests.distributed.failing_run import Failure
from tests.distributed.pool import WorkerPool
from tests.distributed.test_failure import OPTIONS, REPOSITORY
from tests.distributed.test_train import train
from tests.processes import left_with

SETTINGS = (*OPTIONS, "warm_start.steps=2", "warm_start.batch_size=8", "trainer.steps=2")
ENDS_S = 60
"""How long the other nodes may go on after one has failed."""


def node(index: int, port: int, folder: Path, module: str, **env: str) -> "subprocess.Popen[str]":
    """Starts one of two nodes, as the README does, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run1"]
    sizes = ["trainer.nodes=2", "trainer.ranks_per_node=1", f"trainer.output_dir={folder / 'two'}"]
    return subprocess.Popen(
        [*torchrun, *meet, "-m", module, *SETTINGS, *sizes],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Two ranks of one node have a core each too, and sums depend on the number of threads.
        preexec_fn=lambda: os.sched_setaffinity(0, {cores[index % len(cores)]}),
    )


def train_on(cores: set[int], overrides: list[str]) -> None:
    """A run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        train(overrides)
    finally:
        os.sched_setaffinity(0, before)


def test_two_nodes_learn_what_one_does(pool: WorkerPool, tmp_path: Path) -> None:
    port = free_port()
    nodes = [node(i, port, tmp_path, "hybridrl.train") for i in range(2)]
    outputs = [one.communicate(timeout=400)[0] for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], "\n".join(outputs)[-4000:]
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    pool.run(train_on, world=2, cores=cores, overrides=[*SETTINGS, f"trainer.output_dir={tmp_path / 'one'}"])
    one, two = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert [name for name in one if not one[name].equal(two[name])] == []


@pytest.mark.full
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_node_that_fails_ends_the_other(tmp_path: Path, phase: str) -> None:
    port, env = free_port(), {"FAIL": Failure(phase).text, "HYBRIDRL_TEST_MARK": str(tmp_path)}
    nodes = [node(i, port, tmp_path, "tests.distributed.failing_run", **env) for i in range(2)]
    deadline = time.monotonic() + 200
    while all(one.poll() is None for one in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    try:
        outputs = [one.communicate(timeout=ENDS_S)[0] for one in nodes]
    finally:
        for one in nodes:
            one.kill()
    assert all(one.returncode != 0 for one in nodes)
    assert f"RuntimeError: this rank is broken in {phase}" in "".join(outputs)
    assert left_with(f"HYBRIDRL_TEST_MARK={tmp_path}") == []
