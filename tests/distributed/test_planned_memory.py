"""The dry run's bytes against those that training really holds."""

import json
from pathlib import Path

import pytest

from hybridrl.config.load import compose
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import load_spec
from hybridrl.planning.estimate import estimate
from hybridrl.planning.hardware import find_hardware
from hybridrl.planning.layouts import Layouts, trained_weights, training_shard
from hybridrl.planning.memory import rank_memory, trained
from tests.distributed import planned_runs
from tests.distributed.actor_runs import make_config
from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import SMALL, launch
from tests.models.tiny import tiny_folder

WIDE = {"hidden_size": 128, "head_dim": 32, "vocab_size": 512}
ADAM = {"name": "adam", "lr": 1e-3}
WORLDS = {
    "one": (1, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2-ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
    "dp4-ep2": (4, {"ep": 2}),
}
CASES = [
    pytest.param(world, dtype, distributed, marks=() if world in ("tp2-ep2", "dp2") else pytest.mark.full)
    for world in WORLDS
    for dtype in ("float32", "bfloat16")
    for distributed in (False, True)
]


@pytest.mark.parametrize(("world", "dtype", "distributed"), CASES)
def test_parameters_gradients_and_optimizer_are_as_planned(pool, world, dtype, distributed):
    size, parallel = WORLDS[world]
    options = {
        "parallel": parallel,
        "optimizer": {**ADAM, "distributed": distributed},
        "model": {"dtype": dtype, "parameter_layout": "engine"},
    }
    folder = tiny_folder("qwen3_moe", **WIDE)
    measured = pool.run(planned_runs.held, world=size, folder=folder, **options)
    config = make_config(size, **options)
    layouts = Layouts(config, trained_weights(load_spec(folder), config), transformer_engine=False)
    for rank, found in enumerate(measured):
        planned = trained(config, layouts, training_shard(layouts, rank))
        for owner, size_now in found.items():
            assert getattr(planned, owner) == pytest.approx(size_now, rel=0.02), (rank, owner)


NAMES = {"masters": "master weights", "engine": "engine weights"}
"""Owners that the ledger calls otherwise."""
BORDERS = {
    "update": ("trained", ("parameters", "gradients", "masters", "moments", "staging")),
    "rollout": ("rollout", ("parameters", "gradients", "masters", "moments", "engine", "staging")),
}
"""Phases of the dry run: the entry of the ledger that it is held to, and the owners."""
CUTS = {"ep2": {}, "tp2": {"tp": 2, "ep": 1}, "tp2 ep2": {"tp": 2}, "pp2": {"pp": 2, "ep": 1}, "cp2": {"cp": 2}}
QUICK_RUNS = (("ep2", "keep"), ("pp2", "single"), ("cp2", "offload"))
RUNS = [
    pytest.param(cut, way, marks=() if (cut, way) in QUICK_RUNS else pytest.mark.full)
    for cut in CUTS
    for way in ("keep", "offload", "single")
]
PAGE = 4096


@pytest.mark.parametrize(("cut", "way"), RUNS)
def test_the_ledger_of_a_run_and_the_bytes_that_it_moves_are_as_planned(
    pool: WorkerPool, tmp_path: Path, cut: str, way: str
) -> None:
    options = [f"parallel.{name}={size}" for name, size in CUTS[cut].items()]
    options += [f"memory.parameters={way}", "memory.optimizer=host", "trainer.export_final=false", "trainer.steps=2"]
    records = launch(pool, tmp_path / "run", *options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    counted = {line["event"]: line["owners"] for line in lines if line["step"] == 2}
    config = compose(["recipe=grpo_tiny_moe", *SMALL, *options])
    spec = load_spec(builtin.resolve(config.model.path, cache_folder()))
    found = estimate(config, trained_weights(spec, config), find_hardware("h100"), cuda=False)
    assert found.reshard is not None
    layouts = found.layouts
    rank = rank_memory(config, layouts, found.reshard, found.hardware, rank=0)  # whose ledger it is
    # One copy lies in regions of whole pages; a parameter of its own may begin one.
    slack = PAGE * (2 + len(layouts.training.params(0))) if way == "single" else 2048
    for phase, (event, owners) in BORDERS.items():
        for owner in owners:
            measured = counted[event][NAMES.get(owner, owner)]
            expected = rank.phases[phase].get(owner, 0)
            assert expected == pytest.approx(measured, rel=0.02, abs=slack), (phase, owner)
    moved, there = records[-1], found.reshard.there
    ranks = range(layouts.world)
    assert there.traffic.sum() == moved["sync/received_bytes"] == moved["sync/sent_bytes"]
    assert there.copied.sum() == moved["sync/copied_bytes"]
    assert sum(map(found.reshard.aliased_bytes, ranks)) == moved["sync/aliased_bytes"]
    assert sum(map(found.reshard.staging_bytes, ranks)) == pytest.approx(moved["sync/staging_bytes"], rel=0.02)
    left = rank.leaving - (own_bytes(counted) if way == "offload" else 0)
    assert left == pytest.approx(moved["memory/out_bytes"], rel=0.02)


def own_bytes(counted: dict[str, dict[str, int]]) -> int:
    """Of the parameters that leave for a rollout, which do not go by the optimizer's parcel."""
    return counted["trained"]["parameters"] - counted["rollout"]["parameters"]
