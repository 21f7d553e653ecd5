"""Ranks of one attempt find each other in a store that is full of what earlier attempts left."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybridrl.parallel.rendezvous import fresh, shared_store

LIMIT = timedelta(seconds=60)
WORLD = 3


@pytest.fixture
def agents_store() -> dist.TCPStore:
    """A store such as torchrun keeps for all attempts."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def client(server: dist.TCPStore) -> dist.Store:
    environment = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": str(WORLD),
    }
    store = shared_store(environment, LIMIT)
    assert store is not None
    return store


def attempt(server: dist.TCPStore, order: tuple[int, ...] = (0, 1, 2), world: int = WORLD) -> list[list[bytes]]:
    """What ranks that enter in this order read of each other's marks; a mark says what its rank read there before."""

    def enter(rank: int) -> tuple[dist.Store, bool]:
        store = fresh(client(server), rank, world, LIMIT)
        had = store.check([f"mark/{rank}"])
        store.set(f"mark/{rank}", f"{rank}")
        return store, had

    with ThreadPoolExecutor(world) as threads:
        entered = list(threads.map(enter, order))
    assert not any(had for _, had in entered), "an earlier attempt's keys are seen"
    return [store.multi_get([f"mark/{rank}" for rank in range(world)]) for store, _ in entered]


def test_each_attempt_sees_its_own_keys_alone(agents_store: dist.TCPStore) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        assert attempt(agents_store, order) == [[b"0", b"1", b"2"]] * WORLD


def test_a_rank_that_entered_and_died_is_not_waited_for(agents_store: dist.TCPStore) -> None:
    attempt(agents_store)
    client(agents_store).set("entered/1", "of-a-rank-that-died-waiting")
    assert attempt(agents_store) == [[b"0", b"1", b"2"]] * WORLD


def test_a_rank_that_does_not_come_back_is_named(agents_store: dist.TCPStore) -> None:
    attempt(agents_store)
    earlier = agents_store.get("entered/1")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(fresh, client(agents_store), 1, WORLD, LIMIT)
        while agents_store.get("entered/1") == earlier:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"ranks \[2\] of 3"):
            fresh(client(agents_store), 0, WORLD, timedelta(seconds=3))
        second.result()


def test_another_number_of_ranks_may_come_back(agents_store: dist.TCPStore) -> None:
    attempt(agents_store)
    assert attempt(agents_store, order=(1, 0), world=2) == [[b"0", b"1"]] * 2


def test_without_torchruns_store_rank_0_makes_one() -> None:
    assert shared_store({"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, LIMIT) is None
