"""What a second sync costs beside its bytes, and syncs of a real trainer's parameters. Runs on ranks of the pool."""

import gc
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.families import weight_map
from hybridrl.reshard.golden import gather, golden_sync
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.reshard.sync import WeightSync
from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs
from tests.distributed.reshard_faults import World
from tests.distributed.reshard_runs import same_bits, shard


class Calls(TorchDispatchMode):
    """Lists the operators that Python calls, and counts the bytes of the tensors that they are given, and those of the
    storages they return that were not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.given_bytes = self.new_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self.given_bytes += sum(t.nbytes for t in _tensors((args, kwargs)))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        self.new_bytes += sum(t.nbytes for t in _tensors(result) if t.untyped_storage().data_ptr() not in given)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in _tensors(one)] if isinstance(value, list | tuple) else []


def second_sync(bucket_bytes: int) -> dict[str, Any]:
    """Calls and allocations of the second and third sync."""
    world = World(bucket_bytes=bucket_bytes)
    sync = world.sync()
    world.train(0)
    sync.run(0)
    sync.run(1)
    world.train(1)
    calls: list[list[str]] = []
    new_bytes = 0
    for version in (2, 3):
        with Calls() as mode:
            sync.run(version)
        calls.append(mode.names)
        new_bytes += mode.new_bytes
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sync.run(4)
    python_bytes = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert world.serves(1)
    assert calls[0] == calls[1]
    parts = sum(len(batch.writes) for one in sync.executor._program.rounds for batch in (*one.pack, *one.unpack))
    return {
        "names": calls[0],
        "new_bytes": new_bytes,
        "python_bytes": python_bytes,
        "rounds": len(sync.plan.rounds),
        "parts": parts + sum(len(batch.writes) for batch in sync.executor._program.copies),
    }


def after_optimizer_steps(folder: Any, **options: dict[str, Any]) -> list[bool]:
    """Syncs straight after steps of the distributed optimizer: the engine has the whole new weights on every rank."""
    rank = dist.get_rank()
    actor = make_actor(folder, **options)
    # Parameters are gathered in the step itself, not by the forward pass after it: a sync in between would miss them.
    assert not any(chunk.ddp_config.overlap_param_gather for chunk in actor._chunks)
    rows = with_old_log_probs(make_rows(), actor)
    loss = make_loss(actor.config.algorithm, 16)
    weights = weight_map(actor.layout.weights.spec)
    layout = TransformersLayout(weights, range(dist.get_world_size()), dtype="float32")
    engine, golden = shard(layout, rank, None), shard(layout, rank, None)
    sync = WeightSync(actor.layout, actor.tensors(), layout, engine, rank)
    changed = []
    for version in range(3):
        before = {name: value.clone() for name, value in engine.items()}
        sync.run(version)
        changed.append(not same_bits(before, engine))
        golden_sync(actor.layout, actor.tensors(), layout, golden, rank)
        assert same_bits(engine, golden)
        for tensor, value in gather(actor.layout, actor.tensors(), rank):
            if tensor.name in engine:
                assert torch.equal(engine[tensor.name], value)
        actor.update(rows, loss)
    return changed
