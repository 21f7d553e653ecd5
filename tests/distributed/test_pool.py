"""The tests' own pool: it serves on after a failure, whether the ranks can go on or have to be replaced."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import WorkerError, WorkerPool


def total() -> tuple[int, float]:
    value = torch.ones(1)
    dist.all_reduce(value)
    return os.getpid(), float(value)


def fail_on(rank: int | None) -> None:
    """Raises on one rank, for which the others wait, or on all."""
    if rank is None or dist.get_rank() == rank:
        raise ValueError(f"rank {dist.get_rank()} fails")
    dist.all_reduce(torch.ones(1))


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_ranks_that_raise_serve_on_and_each_tells_its_error(pool: WorkerPool, rank: int | None) -> None:
    before = pool.run(total, world=2)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {rank or 0} fails") as error:
        pool.run(fail_on, world=2, rank=rank)
    assert "rank 0:" in str(error.value)
    assert "rank 1:" in str(error.value)
    assert pool.run(total, world=2) == before
    assert [value for _, value in before] == [2.0, 2.0]
    assert time.monotonic() - started < 100  # a collective waits for 240 s


def test_a_rank_that_died_is_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="exit code 3"):
        pool.run(die, world=2)
    assert [value for _, value in pool.run(total, world=2)] == [2.0, 2.0]
