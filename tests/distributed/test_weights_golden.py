"""The golden path writes what it should, bit for bit, between any two layouts, again and again, or refuses as one."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from tests.distributed import golden_runs
from tests.distributed.pool import WorkerPool

MEGABYTE = 2**20
DENSE: tuple[Mapping[str, Any], ...] = (
    {},
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "engine_order": True},
    {"pp": 2, "vpp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2, "first_stage_layers": 1},
    {"ranks": (0, 1, 2, 3)},
    {"ranks": (1, 3)},
)
MOE: tuple[Mapping[str, Any], ...] = (
    {},
    {"tp": 2, "ep": 4},
    {"tp": 4, "etp": 2, "ep": 2},
    {"tp": 4, "etp": 2, "ep": 2, "engine_order": True},
    {"etp": 4},
    {"pp": 2, "ep": 2, "engine_order": True, "transformer_engine": True},
    {"pp": 2, "ep": 2, "transformer_engine": True},
    {"ranks": (2,)},
)


def chain(layouts: tuple[Mapping[str, Any], ...]) -> list[Any]:
    """Each layout once as a source and once as a destination, in pairs that differ."""
    return list(zip(layouts, layouts[1:] + layouts[:1], strict=True))


@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        pytest.param("biased", chain(DENSE), id="dense"),
        pytest.param("tied moe", chain(MOE), id="moe"),
        *(
            pytest.param(s, list(product(DENSE, DENSE)), id=f"{s}, all", marks=pytest.mark.full)
            for s in ("biased", "tied")
        ),
        *(pytest.param(s, list(product(MOE, MOE)), id=f"{s}, all", marks=pytest.mark.full) for s in ("mixtral", "moe")),
    ],
)
def test_layout_pairs(pool: WorkerPool, spec: str, pairs: list[Any]) -> None:
    pool.run(golden_runs.sync_pairs, 4, spec=spec, pairs=pairs, bucket_bytes=MEGABYTE)


def test_small_buckets_move_the_same(pool: WorkerPool) -> None:
    pairs = [({"tp": 2, "etp": 2}, {"ep": 2}), ({"pp": 2}, {"ranks": (0, 1)})]
    pool.run(golden_runs.sync_pairs, 2, spec="moe", pairs=pairs, bucket_bytes=500)


def test_gathered_set_does_not_depend_on_the_bucket(pool: WorkerPool) -> None:
    pool.run(golden_runs.gather_with_buckets, 2, limits=[1, 100, 3200, 5000, 2**40])


def test_special_values_arrive_to_the_bit(pool: WorkerPool) -> None:
    pool.run(golden_runs.sync_special_values, 2)


def test_other_dtype_is_converted_only_when_asked(pool: WorkerPool) -> None:
    pool.run(golden_runs.sync_other_dtype, 2)


def test_mistake_of_one_rank_is_refused_by_all_before_anything_is_sent(pool: WorkerPool) -> None:
    pool.run(golden_runs.sync_refusals, 2)


def test_router_bias_of_every_layer_arrives_in_float32(pool: WorkerPool) -> None:
    pool.run(golden_runs.sync_router_bias, 2)
