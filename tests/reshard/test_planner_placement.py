"""Which rank plays which slot."""

import itertools

import numpy as np
import pytest

from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.placement import assignment, place
from hybridrl.reshard.planner import Planner
from tests.reshard import worlds
from tests.reshard.models import weights


@pytest.mark.parametrize("size", range(1, 6))
def test_assignment_is_the_best_of_all_permutations(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(40):
        value = random.integers(0, 9, (size, size))
        chosen = assignment(value)
        assert sorted(chosen) == list(range(size))
        best = max(sum(value[i, p[i]] for i in range(size)) for p in itertools.permutations(range(size)))
        assert value[np.arange(size), chosen].sum() == best


def layouts(world: int, train: dict[str, int], rollout: dict[str, int]) -> tuple[MegatronLayout, SGLangLayout]:
    tensors = weights("qwen3_moe")
    source = MegatronLayout(tensors, ParallelSizes(world=world, **train))
    return source, SGLangLayout(tensors, RolloutSizes(world=world, **rollout))  # type: ignore[arg-type]


def test_the_bytes_kept_are_those_that_no_plan_receives() -> None:
    source, destination = layouts(8, {"pp": 2, "ep": 2, "tp": 2}, {"tp": 4, "ep": 4})
    placement = place(source, destination)
    totals = {}
    for name, ranks in (("identity", destination.slots), ("auto", placement.ranks)):
        planner = Planner(source, destination.with_ranks(ranks))
        totals[name] = int(planner.routes.direct.sum() + planner.routes.relayed.sum())
    assert totals["identity"] - totals["auto"] == placement.saved_bytes > 0
    assert sorted(placement.ranks) == list(range(8))


def test_where_nothing_is_saved_ranks_stay_where_they_are() -> None:
    source, destination = layouts(4, {"tp": 2, "ep": 4}, {"tp": 4, "ep": 4})
    assert place(source, destination).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("rollout", [{"tp": 4, "ep": 4}, {"tp": 8, "ep": 8}, {"tp": 2, "ep": 2}])
@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_no_replica_is_spread_over_more_nodes(rollout: dict[str, int], per_node: int) -> None:
    source, destination = layouts(16, {"pp": 4, "ep": 4}, rollout)
    placement = place(source, destination, per_node)
    size = rollout["tp"]
    for replica in range(16 // size):
        slots = range(replica * size, (replica + 1) * size)
        assert len({placement.ranks[s] // per_node for s in slots}) == len({s // per_node for s in slots})
    assert placement.saved_bytes >= 0


def test_a_permuted_engine_still_gets_every_element() -> None:
    source, destination = layouts(8, {"pp": 2, "ep": 2, "tp": 2}, {"tp": 4, "ep": 4})
    permuted = destination.with_ranks((5, 3, 0, 7, 1, 2, 6, 4))
    planner = Planner(source, permuted, bucket_bytes=3000)
    whole = worlds.code(source.weights)
    destinations = {rank: worlds.empty(permuted, rank) for rank in permuted.ranks}
    sources = {rank: worlds.fill(source, rank, whole) for rank in source.ranks}
    worlds.carry_out({rank: planner.plan(rank) for rank in range(8)}, sources, destinations)
    assert all(worlds.same(destinations[rank], worlds.fill(permuted, rank, whole)) for rank in range(8))
    for slot, rank in enumerate(permuted.slots):
        assert worlds.same(destinations[rank], worlds.fill(destination, slot, whole))
