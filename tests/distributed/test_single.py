"""One copy of the weights: there and back bit for bit, never more at a time than the larger side and two buckets."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import single_rss, single_runs
from tests.distributed.pool import WorkerPool
from tests.distributed.reshard_runs import ENGINES, SPECS, TRAINING
from tests.distributed.test_reshard import DENSE_ENGINES, DENSE_TRAINING
from tests.models.tiny import tiny_folder

QUICK = [
    ("tp2 pp2 vpp2", "tp4 ep4"),
    ("tp2 ep4", "tp2 ep2 twice, crossed"),
    ("pp2 ep2, engine's order", "tp4 dp2 ep4"),
    ("tp4 ep2 etp2, engine's order", "tp4 ep2"),
    ("pp4", "tp2 elsewhere"),
]


def check_peaks(told: list[list[dict[str, Any]]], bucket_bytes: int) -> None:
    for rank, pairs in enumerate(told):
        for one in pairs:
            assert one["peak"] <= one["larger"] + 2 * bucket_bytes, (rank, one)


def test_weights_go_there_and_back_bit_for_bit(pool: WorkerPool) -> None:
    told = pool.run(single_runs.there_and_back, world=4, spec="moe", pairs=QUICK, bucket_bytes=2**12)
    check_peaks(told, 2**12)


def test_an_embedding_that_the_engine_has_twice_comes_back_too(pool: WorkerPool) -> None:
    pairs = [("tp4 ep2 etp2, engine's order", "tp4 ep2"), ("tp4, engine's order", "tp4")]
    told = pool.run(single_runs.there_and_back, world=4, spec="tied moe", pairs=pairs, bucket_bytes=2**12)
    check_peaks(told, 2**12)


def test_an_engine_of_a_wider_dtype_gives_the_narrow_weights_back(pool: WorkerPool) -> None:
    pairs = [("tp2 pp2 vpp2", "tp4 ep4"), ("one", "whole on all"), ("tp4 ep2 etp2, engine's order", "tp4 ep2")]
    run = {"spec": "moe", "pairs": pairs, "bucket_bytes": 2**12, "dtype": "bfloat16"}
    check_peaks(pool.run(single_runs.there_and_back, world=4, **run), 2**12)


@pytest.mark.full
@pytest.mark.parametrize("train", TRAINING)
@pytest.mark.parametrize("spec", SPECS)
def test_weights_go_there_and_back_over_all_pairs_of_layouts(pool: WorkerPool, spec: str, train: str) -> None:
    engines = list(ENGINES)
    if SPECS[spec].moe is None:
        engines = DENSE_ENGINES if train in DENSE_TRAINING else []
    if spec == "mixtral":
        engines = [name for name in ENGINES if "dp2" not in name]
    turn = list(TRAINING).index(train)
    for index, bucket_bytes in enumerate((2**11, 2**14, 2**22)):  # each meets each layout of either side
        pairs = [(train, name) for i, name in enumerate(engines) if (i + turn) % 3 == index]
        if pairs:
            run = {"spec": spec, "pairs": pairs, "bucket_bytes": bucket_bytes}
            check_peaks(pool.run(single_runs.there_and_back, world=4, **run), bucket_bytes)


WORLDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2 to tp2": (2, {}, {"tp": 2}),
    "pp2 to tp2": (2, {"pp": 2}, {"tp": 2}),
    "ep2 to ep2": (2, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    "tp2 to ep2": (2, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}),
    "pp2 ep2 to tp4": (4, {"pp": 2, "ep": 2}, {"tp": 4}),
}
TRAINED = [
    ("dp2 to tp2", "engine", True, "float32"),
    ("pp2 to tp2", "megatron", False, "bfloat16"),
    ("tp2 to ep2", "engine", True, "bfloat16"),
]


def trained_cases() -> list[Any]:
    found = []
    for world in WORLDS:
        for order in ("engine", "megatron"):
            for distributed in (False, True):
                for dtype in ("float32", "bfloat16"):
                    case = (world, order, distributed, dtype)
                    name = f"{world}-{order}-{'sharded' if distributed else 'whole'}-{dtype}"
                    found.append(pytest.param(*case, marks=() if case in TRAINED else pytest.mark.full, id=name))
    return found


def options(world: str, order: str, distributed: bool, dtype: str) -> dict[str, Any]:
    return {
        "rollout": WORLDS[world][2],
        "parallel": WORLDS[world][1],
        "optimizer": {"distributed": distributed, "lr": 0.02},
        "model": {"parameter_layout": order, "dtype": dtype},
    }


@pytest.mark.parametrize(("world", "order", "distributed", "dtype"), trained_cases())
def test_training_is_the_same_as_with_two_copies(
    pool: WorkerPool, world: str, order: str, distributed: bool, dtype: str
) -> None:
    folder, given = tiny_folder("qwen3_moe", dtype), options(world, order, distributed, dtype)
    for found in pool.run(single_runs.trained_as_with_two_copies, WORLDS[world][0], folder=folder, **given):
        metrics, expected = found["metrics"]
        assert metrics == expected
        assert found["same"]
        assert found["arrived"] == [True] * 3
        assert found["kept"]
        assert found["inside"]
        assert found["finite"]
        held, shared, whole = found["held"]
        assert held < whole or shared > whole / 2


@pytest.mark.parametrize(("world", "distributed", "dtype"), [("dp2 to tp2", True, "float32")])
def test_one_copy_outlives_saves_loads_and_what_leaves_the_device(
    pool: WorkerPool, tmp_path: Path, world: str, distributed: bool, dtype: str
) -> None:
    given = options(world, "engine", distributed, dtype)
    other = tiny_folder("qwen3_moe", dtype, initializer_range=0.1)
    run = {"folder": tiny_folder("qwen3_moe", dtype), "other": other, "out": tmp_path / "out"}
    for lost in pool.run(single_runs.through_events, WORLDS[world][0], **run, **given):
        assert lost == []


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_parameter_that_was_given_other_storage_loses_no_weights(pool: WorkerPool, side: str) -> None:
    folder, given = tiny_folder("qwen3_moe"), {"optimizer": {"distributed": True}}
    for text, touched, there in pool.run(single_runs.careless, 2, folder=folder, side=side, rank=1, **given):
        assert "rank 1: " in text
        assert "was given another storage" in text
        assert not touched
        assert there


@pytest.mark.parametrize("order", ["engine", pytest.param("megatron", marks=pytest.mark.full)])
def test_the_embedded_engine_generates_from_the_only_copy(pool: WorkerPool, order: str) -> None:
    model, parallel = {"parameter_layout": order}, {"pp": 2}
    folder = tiny_folder("qwen3_moe")
    for found in pool.run(single_runs.with_transformers, 2, folder=folder, model=model, parallel=parallel):
        assert max(found["errors"]) <= 1e-4
        assert found["refused"] == [
            text
            for version in range(3)
            for text in (
                "the trainer's parameters cannot be used: the weights are in rollout, not in training",
                f"weights {version} cannot go to the rollout: the weights are in rollout, not in training",
            )
        ]


def test_weights_that_were_lost_half_way_are_told_as_lost(pool: WorkerPool) -> None:
    for switch, later in pool.run(single_runs.half_way, 2, folder=tiny_folder("qwen3_moe"), rank=1):
        assert switch.startswith("weights 0 are half-written and not in service:")
        assert "rank 1: RegionError: no memory" in switch
        assert "they were lost when weights 0 were half-way" in later
        assert "start again from the last checkpoint" in later


NOISE = 2**20
"""Bytes of a rank's resident set that Python and the kernel's own counting add."""


@pytest.mark.parametrize(
    ("train", "rollout", "order"),
    [
        ({"pp": 2, "ep": 2}, {"tp": 4}, True),
        pytest.param({"pp": 4}, {"tp": 2}, True, marks=pytest.mark.full),
        pytest.param({"ep": 4}, {"tp": 4}, True, marks=pytest.mark.full),
        pytest.param({"tp": 4, "ep": 4}, {"tp": 4}, False, marks=pytest.mark.full),
        pytest.param({"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, False, marks=pytest.mark.full),
        pytest.param({"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}, False, marks=pytest.mark.full),
    ],
)
def test_the_resident_set_never_exceeds_the_larger_side_and_two_buckets(
    pool: WorkerPool, train: dict[str, int], rollout: dict[str, int], order: bool
) -> None:
    hidden, bucket_bytes = 512, 4 * 2**20
    assert single_rss.moe_bytes(hidden)[1] >= 200e6
    run = {"hidden": hidden, "train": train, "rollout": rollout, "order": order, "bucket_bytes": bucket_bytes}
    for found in pool.run(single_rss.switches, 4, **run):
        if found is None:
            pytest.skip("this kernel does not start the peak of a process afresh (/proc/self/clear_refs)")
        for switch in found:
            assert switch.peak <= switch.allowed + NOISE
