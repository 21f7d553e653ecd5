"""Real trainers and engines that share a device in time: nothing changes but where the bytes are."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import memory_runs as runs
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder

MOVES = {"optimizer": "host", "margin_bytes": 0, "verify": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2_ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_ep2_etp2": (4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
}
QUICK = [
    ("dp2", True, "bfloat16", "offload"),
    ("tp2_ep2", False, "bfloat16", "keep"),
    ("ep2", True, "float32", "single"),
    ("pp2", False, "float32", "offload"),
]
EVERY = list(product(LAYOUTS, (True, False), ("bfloat16", "float32"), ("keep", "offload", "single")))


def check_cycles(
    pool: WorkerPool,
    arena: Path,
    folder: Path,
    case: tuple[str, bool, str, str],
    turns: int,
    bucket_bytes: int = 1 << 16,
    **memory: Any,
) -> list[dict[str, Any]]:
    """Runs cycles with saves in between; every rank's parameters, masters, moments and steps are its twin's."""
    layout, distributed, dtype, parameters = case
    world, parallel = LAYOUTS[layout]
    options = {
        "bucket_bytes": bucket_bytes,
        "parallel": parallel,
        "memory": {**MOVES, "parameters": parameters, **memory},
        "optimizer": {"distributed": distributed},
        "model": {"dtype": dtype},
    }
    found = pool.run(runs.cycles, world=world, folder=folder, arena=arena, turns=turns, saves=True, **options)
    for rank in found:
        assert rank["differing"] == []
        held = rank["held"]
        assert (held["gradients"], held["moments"]) == (0, 0)
        assert held["master weights"] == 0
        for totals, (looks, inside, fresh) in zip(rank["totals"], rank["inside"], strict=True):
            larger = max(totals["trained"], totals["rollout"])
            assert max(inside, *totals.values()) <= larger + 2 * rank["bucket"]
            assert looks > 0
            assert fresh <= rank["bucket"]  # nothing is cloned on the way, which the ledger would not see
        assert len({tuple(totals.values()) for totals in rank["totals"][1:]}) == 1
    assert len({str(rank["tokens"]) for rank in found}) == 1
    return found


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_cycles_change_no_bit_and_stay_within_the_larger_phase(
    pool: WorkerPool, tmp_path: Path, case: tuple[str, bool, str, str]
) -> None:
    check_cycles(pool, tmp_path, tiny_folder("qwen3_moe"), case, turns=4)


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join(map(str, case)))
def test_twenty_cycles_change_no_bit_in_any_layout(
    pool: WorkerPool, tmp_path: Path, case: tuple[str, bool, str, str]
) -> None:
    check_cycles(pool, tmp_path, tiny_folder("qwen3_moe"), case, turns=20)


@pytest.mark.full
@pytest.mark.parametrize("parameters", ["keep", "offload", "single"])
def test_a_model_of_over_200_mb_stays_within_the_larger_phase_and_takes_no_more_with_time(
    pool: WorkerPool, tmp_path: Path, parameters: str
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "vocab_size": 2048}
    folder = tiny_folder("qwen3_moe", **sizes)  # 4 layers of 32 experts: 52 M parameters
    case = ("ep2", True, "float32", parameters)
    for rank in check_cycles(pool, tmp_path, folder, case, turns=12, bucket_bytes=4 << 20, verify=False):
        assert rank["totals"][-1]["trained"] > 200e6
        assert max(rank["resident"][6:]) - rank["resident"][5] < 0.05 * rank["totals"][-1]["trained"]


def test_a_reference_visits_through_the_policys_storage_and_says_the_same(pool: WorkerPool, tmp_path: Path) -> None:
    memory = {**MOVES, "reference": "disk", "parameters": "offload"}
    options = {"parallel": {"ep": 2}, "memory": memory, "optimizer": {"distributed": True}}
    for rank in pool.run(runs.visits, world=2, folder=tiny_folder("qwen3_moe"), arena=tmp_path, **options):
        assert rank == {"same": [True] * 3, "kept": [[]] * 4, "moved": True, "here": False}


def test_the_ledger_counts_what_lives(pool: WorkerPool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 2000, "hidden_size": 128}
    options = {"memory": {**MOVES, "parameters": "offload"}, "model": {"dtype": "bfloat16"}}
    (found,) = pool.run(runs.counted, world=1, folder=tiny_folder("qwen3_moe", **sizes), arena=tmp_path, **options)
    for where, (counted, live) in found.items():
        assert abs(counted - live) <= 0.01 * live, where


def test_no_rank_wakes_its_cache_before_all_have_let_go(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"parallel": {"ep": 2}, "memory": MOVES, "model": {"dtype": "bfloat16"}}
    found = pool.run(runs.moments_of_a_switch, world=2, folder=tiny_folder("qwen3_moe"), arena=tmp_path, **options)
    last_of_all = [max(rank["left"][switch] for rank in found) for switch in (1, 2)]  # the first switch lets go twice
    for rank in found:
        assert len(rank["left"]) == 3
        assert all(wakes >= left for wakes, left in zip(rank["wakes"], last_of_all, strict=True))
