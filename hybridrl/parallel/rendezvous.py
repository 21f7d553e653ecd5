"""The ranks of one attempt find each other, also where a store still holds what those of an earlier attempt wrote.

torchrun keeps one store for all its restarts, and `torch.distributed` leaves addresses in it under the same keys each
time: a rank that is started again would connect to one that is dead. `TORCHELASTIC_RESTART_COUNT` does not tell the
attempts apart, since each node counts restarts for its own failures. So each rank enters under a name that was never
used, and rank 0 answers to it with the attempt's.
"""

import time
from collections.abc import Mapping
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

POLL_S = 0.01


def shared_store(environment: Mapping[str, str], limit: timedelta) -> dist.Store | None:
    """torchrun's own store, which outlives its ranks; None where rank 0 makes one at each start."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.TCPStore(address, port, int(environment["WORLD_SIZE"]), is_master=False, timeout=limit)


def fresh(store: dist.Store, rank: int, world: int, limit: timedelta) -> dist.Store:
    """The part of the store that is this attempt's alone. All ranks call it; rank 0 returns when all have their answer.

    The ranks of earlier attempts must have ended. Raises TimeoutError on rank 0, and DistStoreError elsewhere, where a
    rank does not come within `limit`, which is the store's timeout as well.
    """
    own = uuid4().hex
    if rank == 0:
        attempt = dist.PrefixStore(own, store)
        _answer(store, attempt, own, world, limit)
        return attempt
    store.set(_place(rank), own)
    attempt = dist.PrefixStore(store.get(own).decode(), store)
    attempt.set(_place(rank), own)
    return attempt


def _place(rank: int) -> str:
    return f"entered/{rank}"


def _answer(store: dist.Store, attempt: dist.Store, own: str, world: int, limit: timedelta) -> None:
    """Tells every rank the attempt's name. A name that an earlier attempt left is answered too, and nobody listens."""
    places = [_place(rank) for rank in range(1, world)]
    deadline = time.monotonic() + limit.total_seconds()
    answered: set[bytes] = set()
    while places and not attempt.check(places):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, world) if not attempt.check([_place(rank)])]
            raise TimeoutError(
                f"ranks {missing} of {world} were started and did not come within {limit.total_seconds():.0f} s"
            )
        for name in store.multi_get(places):
            if name not in answered:
                store.set(name.decode(), own)
                answered.add(name)
        time.sleep(POLL_S)
