"""The pure rank arithmetic agrees with the groups that Megatron makes."""

import os
from itertools import product

import pytest
import torch.distributed as dist

from hybridrl.parallel import groups
from hybridrl.parallel.groups import current, initialize, shutdown
from hybridrl.parallel.sizes import Coordinates, ParallelSizes
from tests.distributed.pool import WorkerPool

Sizes = tuple[int, int, int, int, int]  # tp, cp, pp, ep, etp
QUICK: list[Sizes] = [(2, 1, 1, 4, 1), (2, 1, 2, 1, 2), (1, 2, 2, 2, 1)]


def all_sizes(world: int) -> list[Sizes]:
    found = []
    for sizes in product((1, 2, 4), repeat=5):
        tp, cp, pp, ep, etp = sizes
        if world % (tp * cp * pp) == 0 and world % (etp * ep * pp) == 0:
            found.append(sizes)
    return found


FIXED = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "dp": ("tp", "cp", "pp"),
    "dp_cp": ("tp", "pp"),
    "tp_pp": ("cp", "dp"),
    "ep": ("etp", "edp", "pp"),
    "etp": ("ep", "edp", "pp"),
    "edp": ("etp", "ep", "pp"),
}
"""For each group, the coordinates that its members share."""


def compare_groups(cases: list[Sizes]) -> int:
    for tp, cp, pp, ep, etp in cases:
        sizes = ParallelSizes(world=dist.get_world_size(), tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        made = initialize(sizes)
        assert made.sizes == sizes
        assert made.rank == dist.get_rank()
        places = {rank: sizes.coordinates(rank) for rank in range(sizes.world)}
        assert made.coordinates == places[made.rank]
        for name, fixed in FIXED.items():
            group = getattr(made, name)
            expected = [r for r, at in places.items() if same(at, made.coordinates, fixed)]
            assert dist.get_process_group_ranks(group) == expected, (sizes, name)
            if "_" not in name:
                assert group.rank() == getattr(made.coordinates, name), (sizes, name)
        assert made.is_first_stage == (made.coordinates.pp == 0)
        assert made.is_last_stage == (made.coordinates.pp == pp - 1)
        at = made.coordinates
        assert sizes.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == made.rank
        assert sizes.expert_rank(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == made.rank
        shutdown()
    return len(cases)


def same(one: Coordinates, other: Coordinates, fixed: tuple[str, ...]) -> bool:
    return all(getattr(one, axis) == getattr(other, axis) for axis in fixed)


def test_coordinates_agree_with_megatrons_groups(pool: WorkerPool) -> None:
    assert pool.run(compare_groups, 4, cases=QUICK) == [len(QUICK)] * 4


@pytest.mark.full
def test_coordinates_agree_with_megatrons_groups_for_all_sizes(pool: WorkerPool) -> None:
    cases = all_sizes(4)
    assert len(cases) > 40
    assert pool.run(compare_groups, 4, cases=cases, timeout=600.0) == [len(cases)] * 4


def errors_of_initialize(worlds: list[int]) -> str:
    """The message of the first call that is refused."""
    try:
        for world in worlds:
            initialize(ParallelSizes(world=world))
    except RuntimeError as error:
        return str(error)
    return ""


def test_sizes_for_another_world_are_refused(pool: WorkerPool) -> None:
    (message,) = pool.run(errors_of_initialize, 1, worlds=[2])
    assert "the world has 1 ranks, the sizes are for 2" in message


def test_groups_are_made_once(pool: WorkerPool) -> None:
    (message,) = pool.run(errors_of_initialize, 1, worlds=[1, 1])
    assert "exist already: call shutdown()" in message


def test_without_a_world_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"start_world\(device\)"):
        initialize(ParallelSizes(world=1))
    with pytest.raises(RuntimeError, match=r"initialize\(sizes\)"):
        current()


def test_a_process_without_torchrun_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert "RANK" not in os.environ
    groups.start_world(torch.device("cpu"))
    try:
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert initialize(ParallelSizes(world=1)).sizes.dp == 1
    finally:
        shutdown(world=True)
    assert not dist.is_initialized()
