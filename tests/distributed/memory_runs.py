"""What ranks run to share their device in time: an actor, the embedded engine, and cycles through the phases."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.memory.ledger import Ledger
from hybridrl.memory.pages import resident_bytes
from hybridrl.memory.phases import PhaseError
from hybridrl.memory.residence import parts
from hybridrl.memory.single import SingleWeights
from hybridrl.memory.timeshare import TimeShare
from hybridrl.models.families import load_spec
from hybridrl.parallel import groups
from hybridrl.reshard.sync import WeightSync
from hybridrl.rollout.samples import Prompt, Request, SamplingParams
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.training.actor import Actor, Reference
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row
from hybridrl.training.visiting import VisitingReference
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs
from tests.distributed.golden_runs import same_bits

CPU = torch.device("cpu")


@dataclass
class Shared:
    """One device between a trainer and an engine."""

    actor: Actor
    engine: TransformersEngine
    share: TimeShare
    bucket_bytes: int

    def tokens(self) -> list[list[int]]:
        """What the engine draws, greedily."""
        params = SamplingParams(temperature=0.0, max_new_tokens=4)
        requests = [
            Request(prompt=Prompt(id=i, token_ids=(3, 5 + i, 9)), index=0, seed=i, params=params) for i in range(2)
        ]
        return [list(sample.response_ids) for sample in self.engine.generate(requests)]


@contextmanager
def shared(
    folder: Path, arena: Path, *, bucket_bytes: int = 1 << 16, reference: bool = False, **options: Any
) -> Iterator[Shared]:
    """All of it, on this rank's world."""
    actor, rank = make_actor(folder, **options), dist.get_rank()
    dtype = getattr(torch, actor.config.model.dtype)
    ranks = range(dist.get_world_size())
    engine = TransformersEngine(folder, ranks=ranks, rank=rank, dtype=dtype, release_weights=True)
    sides = (actor.layout, actor.tensors(), engine.layout, engine.parameters())
    way: WeightSync | SingleWeights
    if actor.region is not None:
        way = SingleWeights(*sides[:2], actor.region, *sides[2:], rank, adopt=engine.adopt, bucket_bytes=bucket_bytes)
    else:
        way = WeightSync(*sides, rank, adopt=engine.adopt, bucket_bytes=bucket_bytes)
    single = isinstance(way, SingleWeights)
    with TimeShare(
        actor.config.memory,
        actor,
        engine,
        way if single else way.run,
        staging=way.staging if single else way.executor.staging.tensors,
        regions=(actor.region, way.engine_region if single else None),
        device=CPU,
        device_bytes=None,
        folder=arena,
        reference=reference,
    ) as share:
        yield Shared(actor, engine, share, bucket_bytes)
    way.close()


class Watched(TorchDispatchMode):
    """Weights on their way between the layouts, looked at before every operation on the way and at its end."""

    def __init__(self, weights: Any, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        for name in ("to_rollout", "to_training") if isinstance(weights, SingleWeights) else ("_sync",):
            setattr(weights, name, self._inside(getattr(weights, name)))
        self.looks = self.most = self.fresh = 0

    def take(self) -> tuple[int, int, int]:
        """Since the last call: how many looks there were, the most bytes that the ledger counted at a time, and the
        bytes of all storages that operations made."""
        found = (self.looks, self.most, self.fresh)
        self.looks = self.most = self.fresh = 0
        return found

    def _inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with self:
                result = call(*args)
            self._look()
            return result

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._look()
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.fresh += made.untyped_storage().nbytes()
        return result

    def _look(self) -> None:
        self.most = max(self.most, sum(self._ledger.count().values()))
        self.looks += 1


def state_of(actor: Actor) -> dict[str, Tensor]:
    """Copies of parameters, master weights, moments and step counts."""
    found = {name: tensor.detach().clone() for name, tensor in actor.tensors().items()}
    for i, part in enumerate(parts(actor.optimizer.inner)):
        for j, parameter in enumerate(p for group in part.param_groups for p in group["params"]):
            found[f"master {i} {j}"] = parameter.detach().clone()
            for kind, value in part.state[parameter].items():
                found[f"{kind} {i} {j}"] = torch.as_tensor(value).reshape(-1).clone()
    return found


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same bits."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not same_bits(ours[name], theirs[name])]


def live_bytes(without: list[Tensor]) -> int:
    """Bytes of the storages of all tensors that Python knows, but those."""
    left_out = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in without]
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device == CPU:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(n for p, n in found.items() if not any(a <= p < a + b for a, b in left_out))


def updated(actor: Actor, rows: list[Row], count: int = 1) -> None:
    """Some updates on the same rows."""
    loss = make_loss(actor.config.algorithm, 16)
    for _ in range(count):
        actor.update(rows, loss)


def cycles(
    folder: Path, arena: Path, turns: int, saves: bool = False, bucket_bytes: int = 1 << 16, **options: Any
) -> dict[str, Any]:
    """Cycles of update → rollout, against a twin that never shares its device."""
    twin = make_actor(folder, **{**options, "memory": {}})
    rows = with_old_log_probs(make_rows(), twin)
    updated(twin, rows, turns)
    expected = state_of(twin)
    del twin
    groups.shutdown(world=False)
    gc.collect()
    found: dict[str, Any] = {"resident": [], "totals": [], "moved": [], "inside": []}
    with shared(folder, arena, bucket_bytes=bucket_bytes, **options) as run:
        hybrid, ledger = run.share.hybrid, run.share.ledger
        watched = Watched(hybrid._weights, ledger)
        addresses = run.share.arenas.addresses
        for version in range(turns):
            with hybrid.training_phase():
                updated(run.actor, rows)
            if saves:
                with hybrid.saving():
                    state_of(run.actor)
            with hybrid.rollout_phase(version) as moved:
                found["moved"].append(moved["sync/received_bytes"])
                held = ledger.count()
                tokens = run.tokens()
            found["resident"].append(resident_bytes())
            found["totals"].append({entry.event: entry.total for entry in ledger.take()})
            found["inside"].append(watched.take())
        found["metrics"] = hybrid.take_metrics()
        with hybrid.training_phase():
            found["scores"] = run.actor.log_probs(rows)
            with hybrid.saving():
                found["differing"] = differing(state_of(run.actor), expected)
        assert run.share.arenas.addresses == addresses
        return found | {"bucket": run.bucket_bytes, "held": held, "tokens": tokens, "places": run.share.places}


def visits(folder: Path, arena: Path, **options: Any) -> dict[str, Any]:
    """What a reference that visits says, against one that has a model of its own, while the policy learns."""
    with shared(folder, arena, reference=True, **options) as run:
        actor = run.actor
        own = Reference(actor.config, load_spec(folder), actor.layout.sizes, folder=folder)
        visitor = run.share.visitor(actor.tensors())
        assert visitor is not None
        visiting = VisitingReference(actor, visitor)
        same, kept = [], []
        with run.share.hybrid.training_phase():
            rows = with_old_log_probs(make_rows(), actor)
            for turn in range(3):
                before = state_of(actor) if turn else {}
                ours, theirs = visiting.score(rows), own.score(rows)
                pairs = [*zip(ours.log_probs, theirs.log_probs, strict=True)]
                pairs += zip(ours.entropy, theirs.entropy, strict=True)
                same.append(all(a.tobytes() == b.tobytes() for a, b in pairs))
                kept.append(differing(before, state_of(actor)) if turn else [])
                updated(actor, rows)
                if turn == 1:
                    own.take(actor.tensors())
                    visiting.take(actor.tensors())
            moved = bool((actor.log_probs(rows)[0] != visiting.log_probs(rows)[0]).any())
            before = state_of(actor)
            with pytest.raises(ZeroDivisionError), visitor.visiting():
                _ = 1 // 0
            kept.append(differing(before, state_of(actor)))
            with visitor.visiting(), pytest.raises(RuntimeError, match="has begun already"):
                visitor.visiting().__enter__()
        with run.share.hybrid.rollout_phase(0), pytest.raises(PhaseError, match="in the rollout phase"):
            visiting.score(rows)  # the policy's memory may be away: nothing is read or written
        return {"same": same, "kept": kept, "moved": moved, "here": visitor.here}


def counted(folder: Path, arena: Path, **options: Any) -> dict[str, tuple[int, int]]:
    """At each border of the phases: what the ledger counts, and what all live storages are."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    gc.collect()
    before = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    with shared(folder, arena, **options) as run:
        hybrid, found = run.share.hybrid, {}
        random_states = get_cuda_rng_tracker().get_states().values()  # on the host, whatever the device
        strangers = [*before, *random_states, *(a.memory for a in run.share.arenas._arenas.values())]

        def look(where: str) -> None:
            gc.collect()
            found[where] = (sum(run.share.ledger.count().values()), live_bytes(strangers))

        for version in range(2):
            with hybrid.training_phase():
                updated(run.actor, with_old_log_probs(make_rows(), run.actor))
                look("trained")
            with hybrid.rollout_phase(version):
                look("rollout")
                hybrid.end_rollout()
                look("asleep")
        return found


def moments_of_a_switch(folder: Path, arena: Path, **options: Any) -> dict[str, list[float]]:
    """When the state had left and when the cache began to wake, by the machine's clock; one rank is slow to let go."""
    found: dict[str, list[float]] = {"left": [], "wakes": []}
    with shared(folder, arena, **options) as run:
        hybrid = run.share.hybrid
        released, wake = hybrid._released, run.engine.wake_cache

        def let_go() -> None:
            time.sleep(0.3 * dist.get_rank())
            released()
            found["left"].append(time.monotonic())

        def note_and_wake() -> None:
            found["wakes"].append(time.monotonic())
            wake()

        hybrid._released, run.engine.wake_cache = let_go, note_and_wake
        for version in range(2):
            with hybrid.training_phase():
                updated(run.actor, with_old_log_probs(make_rows(), run.actor))
            with hybrid.rollout_phase(version):
                held = run.share.ledger.count()
                assert held["gradients"] + held["master weights"] + held["moments"] == 0
    return found
