"""What ranks run to test one copy of the weights: there and back, on pages that poison what they held."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.config.sections.memory import MemoryConfig
from hybridrl.memory.region import Region, RegionError, region_bytes
from hybridrl.memory.single import SingleWeights, WeightsStateError, Where
from hybridrl.models.families import weight_map
from hybridrl.reshard.agreement import SyncError
from hybridrl.reshard.aliasing import adopt_data
from hybridrl.reshard.compile import torch_dtype
from hybridrl.reshard.golden import golden_sync
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.storages import Tensors
from hybridrl.rollout.samples import Prompt, Request, SamplingParams
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs
from tests.distributed.reshard_runs import SPECS, codes, engine_layout, same_bits, shard, training_layout, write_shard
from tests.reshard.poison import poison_region


def place(region: Region, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes in the region, which has all of its pages."""
    region.commit()
    return {name: region.take(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def make_single(
    source: Layout, destination: Layout, bucket_bytes: int, make_region: Any = poison_region
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], SingleWeights]:
    """The trainer's tensors in a region, the engine's, and the one copy of the weights that is to be in both."""
    rank = dist.get_rank()
    empty = shard(source, rank, None)
    region = make_region(region_bytes(t.nbytes for t in empty.values()), torch.device("cpu"))
    trained, served = place(region, empty), shard(destination, rank, None)
    single = SingleWeights(
        source,
        trained,
        region,
        destination,
        served,
        rank,
        adopt=adopt_data(served),
        bucket_bytes=bucket_bytes,
        hooks={"post_load_weights": lambda derived: None},
        make_region=make_region,
    )
    return trained, served, single


def there_and_back(
    spec: str, pairs: Sequence[tuple[str, str]], bucket_bytes: int, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Three times there and back for each pair, with other weights each time, all of which arrive bit for bit.

    The trainer's dtype is given, the engine's is float32.

    Returns, for each pair, the peak of both ways and what it may be without buckets, in bytes.
    """
    rank, weights = dist.get_rank(), weight_map(SPECS[spec])
    versions = [
        {name: code.to(torch_dtype(dtype)).float() for name, code in codes(weights, version).items()}
        for version in range(3)
    ]
    told = []
    for train, engine in pairs:
        source, destination = training_layout(weights, train, dtype), engine_layout(weights, engine)
        trained, served, single = make_single(source, destination, bucket_bytes)
        ours, theirs = single.region, single.engine_region
        addresses = [t.data_ptr() for t in (*trained.values(), *served.values())]
        peaks = []
        for version, tensors in enumerate(versions):
            where = (train, engine, version)
            write_shard(source, rank, tensors, trained)
            before = {name: value.clone() for name, value in trained.items()}
            peaks.append(single.to_rollout(version)["sync/peak_bytes"])
            assert single.where is Where.ROLLOUT
            assert same_bits(served, shard(destination, rank, tensors)), (*where, "the engine has other weights")
            shared = ours.committed_bytes
            assert shared <= single.aliased_bytes + 2 * ours.page_bytes * len(served), (*where, "not given back")
            assert theirs.committed_bytes == theirs.nbytes
            single.to_training()
            peaks.append(single.way_back["sync/peak_bytes"])
            assert same_bits(trained, before), (*where, "the trainer has other weights")
            assert (ours.committed_bytes, theirs.committed_bytes) == (ours.nbytes, 0)
        assert addresses == [t.data_ptr() for t in (*trained.values(), *served.values())]
        single.close()
        told.append({"pair": (train, engine), "peak": max(peaks), "larger": max(ours.nbytes, theirs.nbytes + shared)})
    return told


def make_trained(
    folder: Path, rollout: Mapping[str, int], **options: Any
) -> tuple[Actor, dict[str, torch.Tensor], SingleWeights]:
    """An actor with one copy of its weights, the parameters of a stand-in for SGLang, and the way between them."""
    actor = make_actor(folder, memory={"parameters": "single"}, **options)
    return actor, *attach(actor, rollout)


def attach(actor: Actor, rollout: Mapping[str, int]) -> tuple[dict[str, torch.Tensor], SingleWeights]:
    """The stand-in's parameters, and the way between it and an actor with one copy of its weights."""
    rank, sizes = dist.get_rank(), RolloutSizes(world=dist.get_world_size(), **rollout)
    layout = SGLangLayout(actor.layout.weights, sizes, dtype=actor.config.model.dtype)
    served = shard(layout, rank, None)
    assert actor.region is not None
    single = SingleWeights(
        actor.layout, actor.tensors(), actor.region, layout, served, rank, adopt=adopt_data(served), bucket_bytes=2**14
    )
    return served, single


def _views(actor: Actor) -> dict[str, tuple[int, int]]:
    """Where everything lies that views a parameter, and how many elements it has."""
    found = dict(actor.tensors())
    for number, chunk in enumerate(actor._chunks):
        for index, buffer in enumerate((*chunk.buffers, *chunk.expert_parallel_buffers)):
            if buffer.param_data is not None:
                found[f"chunk {number}, buffer {index}"] = buffer.param_data
                found |= {f"chunk {number}, buffer {index}, bucket {b.bucket_id}": b.param_data for b in buffer.buckets}
    for number, part in enumerate(actor.optimizer.inner.chained_optimizers):
        parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
        found |= {f"optimizer {number}, {index}": p for index, p in enumerate(parameters)}
    return {name: (tensor.data_ptr(), tensor.numel()) for name, tensor in found.items()}


def trained_as_with_two_copies(folder: Path, rollout: Mapping[str, int], **options: Any) -> dict[str, Any]:
    """Three updates with a way there and back before each, and the same updates of an actor that keeps its weights."""
    kept = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), kept)
    loss = make_loss(kept.config.algorithm, 16)
    expected = [kept.update(rows, loss) for _ in range(3)]
    weights = {name: tensor.detach().clone() for name, tensor in kept.tensors().items()}
    config = replace(kept.config, memory=MemoryConfig(parameters="single"))
    actor = Actor(config, kept.layout.weights.spec, kept.layout.sizes, folder=folder, total_updates=10)
    served, single = attach(actor, rollout)
    views = _views(actor)
    metrics, arrived = [], []
    for version in range(3):
        before = {name: value.detach().clone() for name, value in actor.tensors().items()}
        single.to_rollout(version)
        held = single.region.committed_bytes
        bits = {name: value.clone() for name, value in served.items()}
        single.to_training()
        arrived.append(same_bits({n: t.detach() for n, t in actor.tensors().items()}, before))
        metrics.append(actor.update(rows, loss))
    return {
        "metrics": (metrics, expected),
        "same": same_bits({n: t.detach() for n, t in actor.tensors().items()}, weights),
        "arrived": arrived,
        "kept": views == _views(actor),
        "inside": all(
            single.region.address <= t.data_ptr() < single.region.address + single.region.nbytes
            for t in actor.tensors().values()
            if isinstance(t, torch.nn.Parameter)
        ),
        "finite": all(bool(torch.isfinite(value).all()) for value in bits.values()),
        "held": (held, single.aliased_bytes, single.region.nbytes),
    }


def through_events(folder: Path, other: Path, out: Path, rollout: Mapping[str, int], **options: Any) -> list[str]:
    """Which of the things that happen to a trainer's memory one copy of the weights does not outlive."""
    actor, served, single = make_trained(folder, rollout, **options)
    rank = dist.get_rank()
    rows = with_old_log_probs(make_rows(), actor)
    loss = make_loss(actor.config.algorithm, 16)
    views = _views(actor)

    def load() -> None:
        import_weights(other, actor.layout, actor.tensors(), rank, convert=True)
        actor.optimizer.inner.reload_model_params()

    def release_gradients() -> None:
        for chunk in actor._chunks:
            chunk.offload_grad_buffers()
            chunk.restore_grad_buffers()

    def offload_moments() -> None:
        for part in actor.optimizer.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        storage, copy = value.untyped_storage(), value.clone()
                        nbytes = storage.nbytes()
                        storage.resize_(0)
                        storage.resize_(nbytes)
                        value.copy_(copy)

    events: dict[str, Callable[[], Any]] = {
        "update": lambda: actor.update(rows, loss),
        "save": lambda: export_weights(out, actor.layout, actor.tensors(), rank, source=folder),
        "load": load,
        "update after load": lambda: actor.update(rows, loss),
        "release gradients": release_gradients,
        "offload moments": offload_moments,
        "last update": lambda: actor.update(rows, loss),
    }
    lost = []
    for version, (name, event) in enumerate(events.items()):
        event()
        before = {n: t.detach().clone() for n, t in actor.tensors().items()}
        twin = golden(actor, served, single)
        single.to_rollout(version)
        there = same_bits(served, twin)
        single.to_training()
        back = same_bits({n: t.detach() for n, t in actor.tensors().items()}, before)
        if not (there and back and _views(actor) == views):
            lost.append(name)
    return lost


def golden(actor: Actor, served: Tensors, single: SingleWeights) -> dict[str, torch.Tensor]:
    """What the engine should get, by the golden path."""
    found = {name: torch.empty_like(tensor) for name, tensor in served.items()}
    golden_sync(actor.layout, actor.tensors(), single.engine_layout, found, dist.get_rank())
    return found


def careless(folder: Path, side: str, rank: int, **options: Any) -> tuple[str, bool, bool]:
    """One rank gives a parameter other storage, of the trainer before the way there or of the engine before that back:
    what the error says, whether it says that nothing was touched, and whether the weights are still somewhere."""
    actor, served, single = make_trained(folder, {"tp": 2}, **options)
    single.to_rollout(0)
    if side == "trainer":
        single.to_training()
    if dist.get_rank() == rank:
        tensors = actor.tensors() if side == "trainer" else served
        name = next(name for name in tensors if "layers.0." in name and name.endswith(("w13", "w13_weight")))
        tensors[name].data = tensors[name].data.clone()
    try:
        single.to_rollout(1) if side == "trainer" else single.to_training()
    except SyncError as error:
        return str(error), error.touched, single.where is not Where.NOWHERE
    return "", True, False


def with_transformers(folder: Path, **options: Any) -> dict[str, Any]:
    """The embedded engine generates from the one copy of the weights, after each of two updates too."""
    actor, rank = make_actor(folder, memory={"parameters": "single"}, **options), dist.get_rank()
    engine = TransformersEngine(folder, ranks=range(dist.get_world_size()), rank=rank, release_weights=True)
    assert actor.region is not None
    single = SingleWeights(
        actor.layout, actor.tensors(), actor.region, engine.layout, engine.parameters(), rank, adopt=engine.adopt
    )
    rows = with_old_log_probs(make_rows(), actor)
    prompt, params = Prompt(id=0, token_ids=(3, 1, 4, 1, 5)), SamplingParams(max_new_tokens=6)
    errors, refused = [], []
    for version in range(3):
        single.to_rollout(version)
        engine.publish(version)
        (sample,) = engine.generate([Request(prompt=prompt, index=0, seed=version, params=params)])
        engine.sleep()
        for call in (single.wait, lambda v=version: single.to_rollout(v)):
            try:
                call()
            except WeightsStateError as error:
                refused.append(str(error))
        single.to_training()
        single.to_training()  # once is enough
        single.wait()
        ids = np.array([*prompt.token_ids, *sample.response_ids])
        (scored,) = actor.log_probs([Row(index=0, token_ids=ids, mask=np.arange(len(ids)) > 0)])
        errors.append(float(np.abs(scored[5:] - np.array(sample.log_probs)).max()))
        actor.update(rows, make_loss(actor.config.algorithm, 16))
        engine.wake()
    return {"errors": errors, "refused": refused}


def half_way(folder: Path, rank: int, **options: Any) -> tuple[str, str]:
    """One rank has no memory for the engine's weights: what the switch says, and what is said of the weights then."""
    _, _, single = make_trained(folder, {"tp": 2}, **options)

    def commit(start: int, stop: int) -> None:
        raise RegionError("no memory")

    if dist.get_rank() == rank:
        single.engine_region.commit = commit  # type: ignore[assignment]
    told = []
    for call in (lambda: single.to_rollout(0), single.to_training):
        try:
            call()
        except (SyncError, WeightsStateError) as error:
            told.append(str(error))
    assert single.where is Where.NOWHERE
    return told[0], told[1]
