"""What goes wrong on one rank of a reshard, and what all ranks then see. Runs on ranks of the pool."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.models.families import weight_map
from hybridrl.reshard.agreement import SyncError
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.reshard.plan import Derived
from hybridrl.reshard.sync import WeightSync
from hybridrl.reshard.transports import Exchange, GlooTransport, SharedTransport, make_transport
from tests.distributed.reshard_runs import (
    SPECS,
    TRANSPORTS,
    codes,
    engine_layout,
    same_bits,
    shard,
    training_layout,
    write_shard,
)

PAIR = ("tp2 ep4", "tp4 ep2")


class World:
    """Both sides of one reshard on this rank, and the weights of any version."""

    def __init__(self, **options: Any) -> None:
        self.rank = dist.get_rank()
        self.weights = weight_map(SPECS["moe"])
        self.source, self.destination = training_layout(self.weights, PAIR[0]), engine_layout(self.weights, PAIR[1])
        self.trained, self.served = shard(self.source, self.rank, None), shard(self.destination, self.rank, None)
        self.options = {"bucket_bytes": 2**13, **options}

    def sync(self) -> WeightSync:
        return WeightSync(self.source, self.trained, self.destination, self.served, self.rank, **self.options)

    def train(self, version: int) -> None:
        write_shard(self.source, self.rank, codes(self.weights, version), self.trained)

    def serves(self, version: int) -> bool:
        return same_bits(self.served, shard(self.destination, self.rank, codes(self.weights, version)))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def failure(call: Callable[[], Any], kind: type[Exception] = SyncError) -> Any:
    """The error that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def other_storage() -> str:
    """A parameter of one rank is given other storage between two syncs."""
    world = World()
    sync = world.sync()
    world.train(0)
    sync.run(0)
    world.train(1)
    name = next(iter(world.served))
    kept = world.served[name].data
    if world.rank == 1:
        world.served[name].data = kept.clone()
    error = failure(lambda: sync.run(1))
    assert not error.touched
    assert sync.version == 0
    assert world.serves(0)
    world.served[name].data = kept
    sync.run(1)
    assert world.serves(1)
    assert sync.version == 1
    return str(error)


def released_storage() -> str:
    """Storage that its owner released is found; taken back, wherever it is then, it is written again."""
    world = World()
    sync = world.sync()
    name = next(iter(world.served))
    storage = world.served[name].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    error = failure(lambda: sync.run(0))
    hold = [torch.empty(size, dtype=torch.uint8) for _ in range(4)]  # so that it comes back elsewhere
    storage.resize_(size)
    for version in range(2):
        world.train(version)
        sync.run(version)
        assert world.serves(version)
    del hold
    return str(error)


def failure_in_a_round(number: int, step: str) -> str:
    """Packing or unpacking fails on rank 2 in one round of the second sync."""
    world = World()
    sync = world.sync()
    world.train(0)
    sync.run(0)
    world.train(1)
    batches = getattr(sync.executor._program.rounds[number], step)
    kept = batches[0].reads[-1]
    if world.rank == 2:
        batches[0].reads[-1] = torch.zeros(7, 3, 5)  # of a shape that goes into nothing
    error = failure(lambda: sync.run(1))
    assert error.touched
    assert sync.version is None
    batches[0].reads[-1] = kept
    sync.run(1)
    assert world.serves(1)
    assert sync.version == 1
    return str(error)


def different_versions() -> str:
    world = World()
    sync = world.sync()
    world.train(0)
    sync.run(0)
    world.train(1)
    error = failure(lambda: sync.run(1 if world.rank else 2))
    assert not error.touched
    assert sync.version == 0
    assert world.serves(0)
    return str(error)


def wrong_shape() -> str:
    """One rank's engine has another shape than its layout: nobody sends anything."""
    world = World()
    name = list(world.served)[3]
    if world.rank == 3:
        world.served[name] = torch.full((3, 5), float("nan"))
    error = failure(world.sync, WeightError)
    assert all(value.isnan().all() for value in world.served.values())
    return str(error)


def no_such_plan() -> str:
    """The engine wants a tensor that the trainer does not have."""
    world = World()
    world.source = training_layout(weight_map(SPECS["dense"]), "tp2")
    world.trained = shard(world.source, world.rank, None)
    return str(failure(world.sync, WeightError))


def different_settings() -> str:
    world = World(bucket_bytes=2**13 if dist.get_rank() else 2**14)
    return str(failure(world.sync, WeightError))


def late_rank(transport: str) -> list[str]:
    """A rank that does not come to the second exchange: the others give up in time, and all know; later syncs too."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    exchanges: list[Exchange] = []
    world = World(transport=TRANSPORTS[transport](group))
    sync = world.sync()
    start = sync.executor._transport.start

    def stays_away(exchange: Exchange) -> None:
        if len(exchanges) == 1:
            raise OSError("lost the network")
        exchanges.append(exchange)
        start(exchange)

    with replaced(sync.executor._transport, "start", stays_away if world.rank == 1 else start):
        error = failure(lambda: sync.run(0))
    assert error.touched
    assert sync.version is None
    again = failure(lambda: sync.run(1))
    assert sync.version is None
    return [str(error), str(again)]


def slow_rank(round_number: int) -> str:
    """A rank that comes to an exchange when the others have given it up: it goes on, and is told at the end."""
    world = World(transport=SharedTransport.connect(dist.new_group(timeout=timedelta(seconds=3))))
    sync = world.sync()
    start = sync.executor._transport.start
    calls = 0

    def dawdles(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        if calls == round_number % len(sync.plan.rounds) + 1:
            time.sleep(4.5)
        start(exchange)

    with replaced(sync.executor._transport, "start", dawdles if world.rank == 2 else start):
        error = failure(lambda: sync.run(0))
    assert error.touched
    assert sync.version is None
    return str(error)


def no_shared_memory(where: str) -> list[bool]:
    """One rank can give no memory, or cannot see another's: none shares memory, nothing stays open, and syncs go on."""
    rank = dist.get_rank()

    def denied(*_: Any) -> Any:
        raise OSError("no such thing here")

    owner, name = {"give": (os, "memfd_create"), "see": (os, "readlink")}[where]
    before = len(os.listdir("/proc/self/fd"))
    with replaced(owner, name, denied if rank == 2 else getattr(owner, name)):
        transport = make_transport(torch.device("cpu"))
    assert len(os.listdir("/proc/self/fd")) <= before  # an earlier world's threads may close theirs meanwhile
    world = World(transport=transport)
    sync = world.sync()
    for version in range(2):
        world.train(version)
        sync.run(version)
        assert world.serves(version)
    return isinstance(transport, GlooTransport)


def no_memory_for_staging() -> str:
    world = World(transport=SharedTransport.connect())

    def full(*_: Any) -> Any:
        raise OSError("no space left on device")

    with replaced(os, "posix_fallocate", full if world.rank == 1 else os.posix_fallocate):
        return str(failure(world.sync, WeightError))


def descriptors() -> int:
    """How many pipes and memories stay open of five weight syncs that were run and closed."""
    world = World()
    before = _shared_descriptors()
    for version in range(5):
        with world.sync() as sync:
            assert isinstance(sync.executor._transport, SharedTransport)
            sync.run(version)
            assert _shared_descriptors() > before
        del sync
        gc.collect()
    return _shared_descriptors() - before


def _shared_descriptors() -> int:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("pipe:") or "memfd:hybridrl" in link for link in links)


def corrupted() -> str:
    """A bit that flips in one rank's copy, after it was received, is found by the checksums alone."""
    world = World(verify=True)
    sync = world.sync()
    world.train(0)
    sync.run(0)
    received = next(s.view for r in sync.plan.rounds for m in r.receives for s in m.segments)
    check = sync._check

    def flips() -> None:
        if world.rank == 3:
            world.served[received.param][received.slices].view(torch.int32).flatten()[-1:] ^= 1
        assert check is not None
        check()

    with replaced(sync, "_check", flips):
        error = failure(lambda: sync.run(1))
    assert error.touched
    assert sync.version is None
    return str(error)


class Derives(TransformersLayout):
    """A layout whose engine keeps the sum of each layer's norms beside them."""

    def derived(self, rank: int) -> list[Derived]:
        names = [name for name in self.params(rank) if name.endswith("input_layernorm.weight")]
        return [Derived(f"{name}.sum", (name,), "sum_norms") for name in names]


def derived_state() -> str:
    """Derived state is rebuilt from new weights after each sync; a hook that fails on one rank fails all."""
    rank, weights = dist.get_rank(), weight_map(SPECS["moe"])
    source, destination = training_layout(weights, "ep4"), Derives(weights, range(4))
    trained, served = shard(source, rank, None), shard(destination, rank, None)
    sums: dict[str, float] = {}

    def rebuild(items: Any) -> None:
        if rank == 2 and len(sums) == -1 + 2 * len(items):
            raise RuntimeError("no memory for norms")
        for item in items:
            sums[item.name] = float(served[item.sources[0]].sum())

    missing = failure(lambda: WeightSync(source, trained, destination, served, rank), WeightError)
    sync = WeightSync(source, trained, destination, served, rank, hooks={"sum_norms": rebuild})
    for version in range(2):
        tensors = codes(weights, version)
        write_shard(source, rank, tensors, trained)
        sync.run(version)
        assert len(sums) == 4
        assert all(sums[f"{name}.sum"] == float(tensors[name].sum()) for name in tensors if f"{name}.sum" in sums)
    if rank == 2:
        sums.update({str(i): 0.0 for i in range(3)})
    return f"{missing} AND {failure(lambda: sync.run(2))}"
