"""One copy of the weights: there and back bit for bit, never more at a time than the larger side and two buckets."""

from typing import Any

import pytest

from tests.distributed import single_runs
from tests.distributed.pool import WorkerPool
from tests.distributed.reshard_runs import SPECS
from tests.distributed.test_reshard import ALL, DENSE_ENGINES, DENSE_TRAINING

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


@pytest.mark.full
@pytest.mark.parametrize("bucket_bytes", [2**11, 2**14, 2**22])
@pytest.mark.parametrize("spec", SPECS)
def test_weights_go_there_and_back_over_all_pairs_of_layouts(pool: WorkerPool, spec: str, bucket_bytes: int) -> None:
    pairs = ALL
    if SPECS[spec].moe is None:
        pairs = [(t, e) for t, e in ALL if t in DENSE_TRAINING and e in DENSE_ENGINES]
    if spec == "mixtral":
        pairs = [(t, e) for t, e in ALL if "dp2" not in e]
    run = {"spec": spec, "pairs": pairs, "bucket_bytes": bucket_bytes}
    check_peaks(pool.run(single_runs.there_and_back, world=4, timeout=1500.0, **run), bucket_bytes)
