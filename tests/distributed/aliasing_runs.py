"""What ranks run to share the trainer's storage with an engine: a stand-in with the parameters of SGLang's layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.models.families import weight_map
from hybridrl.models.megatron.build import unwrap
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.agreement import SyncError
from hybridrl.reshard.aliasing import adopt_data
from hybridrl.reshard.compile import torch_dtype
from hybridrl.reshard.golden import golden_sync
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.sync import WeightSync
from hybridrl.rollout.samples import Prompt, Request, SamplingParams
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs
from tests.distributed.golden_runs import same_bits
from tests.distributed.memory_runs import shared, updated
from tests.distributed.reshard_again import Calls

MOVED = ("sync/received_bytes", "sync/sent_bytes", "sync/copied_bytes", "sync/staging_bytes")


@dataclass
class Shared:
    """An actor, an engine's parameters, and the sync between them."""

    actor: Actor
    layout: SGLangLayout
    parameters: dict[str, torch.nn.Parameter]
    sync: WeightSync

    def twin(self) -> dict[str, torch.Tensor]:
        """What the engine should hold now, by the golden path."""
        rank = dist.get_rank()
        found = {n: torch.empty_like(p.data) for n, p in self.parameters.items()}
        golden_sync(self.actor.layout, self.actor.tensors(), self.layout, found, rank)
        return found

    def agrees(self) -> bool:
        """Whether the engine's parameters are those, bit for bit."""
        twin = self.twin()
        return all(same_bits(self.parameters[name].data, value) for name, value in twin.items())

    def update(self) -> dict[str, float]:
        """A step on the same rows each time."""
        rows = with_old_log_probs(make_rows(), self.actor)
        return self.actor.update(rows, make_loss(self.actor.config.algorithm, 16))


def make_shared(folder: Path, rollout: Mapping[str, int], **options: Any) -> Shared:
    """All of it, on this rank's world; the engine's parameters hold NaN before they are shared."""
    actor, rank = make_actor(folder, **options), dist.get_rank()
    sizes = RolloutSizes(world=dist.get_world_size(), **rollout)
    layout = SGLangLayout(actor.layout.weights, sizes, dtype=actor.config.model.dtype)
    parameters = {
        name: torch.nn.Parameter(torch.full(p.shape, float("nan"), dtype=getattr(torch, p.dtype)), requires_grad=False)
        for name, p in layout.params(rank).items()
    }
    sync = WeightSync(actor.layout, actor.tensors(), layout, parameters, rank, adopt=adopt_data(parameters))
    return Shared(actor, layout, parameters, sync)


def through_steps(folder: Path, rollout: Mapping[str, int], **options: Any) -> dict[str, Any]:
    """Three updates, after each of which the engine has the new weights before any sync, and a sync that moves none."""
    shared = make_shared(folder, rollout, **options)
    addresses = {name: p.data_ptr() for name, p in shared.parameters.items()}
    agreed, moved = [shared.agrees()], []
    before = {name: p.detach().clone() for name, p in shared.parameters.items()}
    for step in range(3):
        shared.update()
        agreed.append(shared.agrees())
        metrics = shared.sync.run(step)
        moved.append(sum(metrics[name] for name in MOVED))
        agreed.append(shared.agrees())
    return {
        "agreed": agreed,
        "moved": moved,
        "aliased": metrics["sync/aliased_bytes"],
        "bytes": sum(p.nbytes for p in shared.parameters.values()),
        "changed": all(bool((before[n] != p).any()) for n, p in shared.parameters.items() if "embed" not in n),
        "kept": addresses == {name: p.data_ptr() for name, p in shared.parameters.items()},
        "plan": (len(shared.sync.plan.copies), len(shared.sync.plan.rounds), len(shared.sync.plan.fills)),
    }


def through_events(folder: Path, other: Path, out: Path, rollout: Mapping[str, int], **options: Any) -> list[str]:
    """Which of the things that happen to a trainer's memory the sharing does not outlive."""
    shared = make_shared(folder, rollout, **options)
    actor, rank = shared.actor, dist.get_rank()

    def save() -> None:
        export_weights(out, actor.layout, actor.tensors(), rank, source=folder)

    def load() -> None:
        import_weights(other, actor.layout, actor.tensors(), rank, convert=True)
        actor.optimizer.inner.reload_model_params()

    def release_gradients() -> None:
        for chunk in actor._chunks:
            chunk.offload_grad_buffers()
            chunk.restore_grad_buffers()

    events: dict[str, Callable[[], Any]] = {
        "update": shared.update,
        "save": save,
        "load": load,
        "update after load": shared.update,
        "release gradients": release_gradients,
        "update after release": shared.update,
        "forget moments": actor.optimizer.forget,
        "last update": shared.update,
    }
    lost = []
    for version, (name, event) in enumerate(events.items()):
        event()
        metrics = shared.sync.run(version)
        if not shared.agrees() or any(metrics[key] for key in MOVED):
            lost.append(name)
    return lost


def loaded_weights_stay(folder: Path, other: Path, rollout: Mapping[str, int], **options: Any) -> bool:
    """Whether weights that were loaded into a live actor outlive a step with a learning rate of 0."""
    shared = make_shared(folder, rollout, **options)
    shared.update()
    import_weights(other, shared.actor.layout, shared.actor.tensors(), dist.get_rank(), convert=True)
    shared.actor.optimizer.inner.reload_model_params()
    loaded = {name: p.detach().clone() for name, p in shared.parameters.items()}
    rows = with_old_log_probs(make_rows(), shared.actor)
    shared.actor.update(rows, make_loss(shared.actor.config.algorithm, 16), lr=0.0)
    return all(same_bits(p.data, loaded[name]) for name, p in shared.parameters.items())


def _give_data(module: torch.nn.Module, name: str) -> None:
    parameter = module.get_parameter(name)
    parameter.data = parameter.data.clone()


def _assign_state(module: torch.nn.Module, name: str) -> None:
    module.load_state_dict({name: module.get_parameter(name).detach().clone()}, strict=False, assign=True)


def _convert(module: torch.nn.Module, name: str) -> None:
    module.double().float()


def _set_attribute(module: torch.nn.Module, name: str) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, torch.nn.Parameter(module.get_parameter(name).detach().clone()))


def _remove(module: torch.nn.Module, name: str) -> None:
    path, _, last = name.rpartition(".")
    delattr(module.get_submodule(path), last)


CARELESS: Mapping[str, Callable[[torch.nn.Module, str], None]] = {
    "param.data": _give_data,
    "load_state_dict(assign=True)": _assign_state,
    "to another dtype and back": _convert,
    "another parameter": _set_attribute,
    "no parameter": _remove,
}
"""What a caller does to a parameter of a module, of that name, without a thought for who else holds its storage."""


def careless(folder: Path, way: str | None, rank: int, **options: Any) -> tuple[str, bool]:
    """One rank is careless with the trainer's parameter (`way`), or gives the engine's other storage (None): what the
    error says, and whether it says that nothing was touched."""
    shared = make_shared(folder, {}, **options)
    shared.sync.run(0)
    if dist.get_rank() == rank:
        if way is None:
            name = next(name for name in shared.parameters if name.endswith("experts.w13_weight"))
            shared.parameters[name].data = shared.parameters[name].data.clone()
        else:
            (chunk,) = shared.actor.chunks
            CARELESS[way](unwrap(chunk), "decoder.layers.0.mlp.experts.w13")
    try:
        shared.sync.run(1)
    except SyncError as error:
        return str(error), error.touched
    return "", True


def through_phases(folder: Path, other: Path, arena: Path, **options: Any) -> dict[str, Any]:
    """Three steps of a trainer and the embedded engine in phases, between which gradients are released and optimizer
    state leaves; one loads other weights, which a step at a rate of 0 does not change. Then rank 1 is careless with a
    parameter that is shared."""
    with shared(folder, arena, **options) as run:
        actor, hybrid, rank = run.actor, run.share.hybrid, dist.get_rank()
        with hybrid.training_phase():
            rows = with_old_log_probs(make_rows(), actor)
        found: dict[str, Any] = {"lost": [], "aliased": [], "common": [], "left": [], "kept": []}

        def save() -> None:
            export_weights(arena / f"out-{version}", actor.layout, actor.tensors(), rank, source=folder)

        def load() -> None:
            import_weights(other, actor.layout, actor.tensors(), rank, convert=True)
            actor.optimizer.inner.reload_model_params()

        for version, event in enumerate((save, load, save)):
            with hybrid.training_phase():
                before = {name: tensor.detach().clone() for name, tensor in actor.tensors().items()}
                actor.update(rows, make_loss(actor.config.algorithm, 16), lr=0.0)
                found["kept"].append(all(same_bits(tensor, before[n]) for n, tensor in actor.tensors().items()))
                updated(actor, rows)
                with hybrid.saving():
                    event()
                twin = {
                    n: torch.empty(p.shape, dtype=torch_dtype(p.dtype))
                    for n, p in run.engine.layout.params(rank).items()
                }
                golden_sync(actor.layout, actor.tensors(), run.engine.layout, twin, rank)
            with hybrid.rollout_phase(version) as moved:
                served = run.engine.parameters()
                found["lost"] += [(version, name) for name, value in twin.items() if not same_bits(served[name], value)]
                found["aliased"].append(moved["sync/aliased_bytes"])
                places = {tensor.data_ptr() for tensor in actor.tensors().values() if tensor.untyped_storage().nbytes()}
                found["common"].append(sorted(n for n, tensor in served.items() if tensor.data_ptr() in places))
                held = run.share.ledger.count()
                found["left"].append((held["gradients"], held["master weights"], held["moments"]))
                run.tokens()
        with hybrid.training_phase():
            if rank == 1:
                parameter = next(t for name, t in actor.tensors().items() if name.endswith("layers.1.mlp.experts.w13"))
                parameter.data = parameter.data.clone()
        try:
            with hybrid.rollout_phase(version + 1):
                found["refused"] = ""
        except SyncError as error:
            found["refused"] = str(error)
        return found


def deaf_engine(folder: Path) -> str:
    """What the error says where an engine claims to have adopted and has not."""
    actor = make_actor(folder, model={"parameter_layout": "engine"})
    layout = SGLangLayout(actor.layout.weights, RolloutSizes(world=1), dtype="float32")
    parameters = {n: torch.zeros(p.shape) for n, p in layout.params(0).items()}
    try:
        WeightSync(actor.layout, actor.tensors(), layout, parameters, 0, adopt=lambda tensors: None)
    except WeightError as error:
        return str(error)
    return ""


def with_transformers(folder: Path, release: bool, **options: Any) -> dict[str, Any]:
    """The embedded engine, which shares what it holds as the trainer does, and must never free it."""
    actor, rank = make_actor(folder, **options), dist.get_rank()
    engine = TransformersEngine(folder, ranks=range(dist.get_world_size()), rank=rank, release_weights=release)
    sync = WeightSync(actor.layout, actor.tensors(), engine.layout, engine.parameters(), rank, adopt=engine.adopt)
    rows = with_old_log_probs(make_rows(), actor)
    errors = []
    for version in range(3):
        if version:
            engine.sleep()
            actor.update(rows, make_loss(actor.config.algorithm, 16))
        engine.wake()
        sync.run(version)
        engine.publish(version)
        prompt = Prompt(id=0, token_ids=(3, 1, 4, 1, 5))
        params = SamplingParams(max_new_tokens=6)
        (sample,) = engine.generate([Request(prompt=prompt, index=0, seed=version, params=params)])
        ids = np.array([*prompt.token_ids, *sample.response_ids])
        (scored,) = actor.log_probs([Row(index=0, token_ids=ids, mask=np.arange(len(ids)) > 0)])
        errors.append(float(np.abs(scored[5:] - np.array(sample.log_probs)).max()))
    return {"errors": errors, "shared": sorted(alias.destination for alias in sync.plan.aliases)}


def work_of_sync(specs: list[ModelSpec], alias: bool) -> list[tuple[list[str], int, int]]:
    """Of a third sync of each model, which both sides lay out alike: the operators that it calls, and the bytes that
    they are given and make."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for spec in specs:
        weights = weight_map(spec)
        source = MegatronLayout(weights, ParallelSizes(world=world), engine_order=True)
        layout = SGLangLayout(weights, RolloutSizes(world=world))
        ours, theirs = (
            {n: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for n, p in one.params(rank).items()}
            for one in (source, layout)
        )
        sync = WeightSync(source, ours, layout, theirs, rank, adopt=adopt_data(theirs) if alias else None)
        assert sync.aliased_bytes == (weights.nbytes if alias else 0)
        assert sum(t.nbytes for t in theirs.values()) == weights.nbytes
        sync.run(0)
        sync.run(1)
        with Calls() as calls:
            sync.run(2)
        found.append((calls.names, calls.given_bytes, calls.new_bytes))
    return found
