"""A second sync costs nothing beside its bytes, and brings what the optimizer has just stepped."""

import pytest

from tests.distributed import reshard_again
from tests.models.tiny import tiny_folder


@pytest.mark.parametrize("bucket_bytes", [2**14, 2**20])
def test_a_second_sync_allocates_nothing_and_calls_once_a_group(pool, bucket_bytes):
    for told in pool.run(reshard_again.second_sync, world=4, bucket_bytes=bucket_bytes):
        assert told["new_bytes"] == 0
        assert told["python_bytes"] < 2**15
        copies = [name for name in told["names"] if "copy" in name]
        assert len(copies) <= 4 * (told["rounds"] + 1)
        assert len(copies) < told["parts"] / 2 or bucket_bytes < 2**20
        assert len(told["names"]) - len(copies) <= told["rounds"] + 12


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), pytest.param(4, {"tp": 2, "ep": 4}, marks=pytest.mark.full), (4, {"pp": 2, "ep": 2})],
)
def test_syncs_follow_steps_of_the_distributed_optimizer(pool, world, parallel):
    options = {"parallel": parallel, "optimizer": {"distributed": True, "lr": 1e-2}}
    told = pool.run(reshard_again.after_optimizer_steps, world=world, folder=tiny_folder("qwen3_moe"), **options)
    assert told == [[True, True, True]] * world
