"""What ranks run to write Megatron's distributed checkpoint in one parameter layout and read it in another."""

import gc
import multiprocessing
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from hybridrl.models.megatron.build import unwrap
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, whole_tensors, with_old_log_probs

KEPT = ("exp_avg", "exp_avg_sq")


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _state(actor: Actor, moments: bool, *, loading: bool) -> dict[str, Any]:
    (chunk,) = actor._chunks
    found = {"model": unwrap(chunk).sharded_state_dict(metadata=_metadata())}
    if moments:
        state = actor.optimizer.inner.sharded_state_dict(found["model"], is_loading=loading, metadata=_metadata())
        found["optimizer"] = state
    return found


def _learned(actor: Actor) -> dict[str, float]:
    rows = with_old_log_probs(make_rows(), actor)
    return actor.update(rows, make_loss(actor.config.algorithm, 16))


def save(folder: Path, out: Path, moments: bool, **options: Any) -> dict[str, Any]:
    """Trains two steps and saves; the weights then, and what two more steps give."""
    actor = make_actor(folder, **options)
    for _ in range(2):
        _learned(actor)
    if dist.get_rank() == 0:
        out.mkdir()
    dist.barrier()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # its writer has children
    metadata = {key: value for key, value in _metadata().items() if key != "dp_cp_group"}
    filesystem_async._results_queue = queue.Queue()  # its own is in another process, for saves beside the training
    dist_checkpointing.save(_state(actor, moments, loading=False), str(out), content_metadata=metadata)
    filesystem_async._results_queue = None
    gc.collect()
    return {"weights": whole_tensors(actor, "weights"), "metrics": [_learned(actor) for _ in range(2)]}


def load(folder: Path, saved: Path, moments: bool, **options: Any) -> dict[str, Any]:
    """Loads into an actor of other weights; the weights then, and what two steps give."""
    actor = make_actor(folder, **options)
    with torch.no_grad():
        for tensor in actor.tensors().values():
            tensor.mul_(0.5)  # padding stays zero, and nothing else stays right
    if moments:
        _prime(actor)
    state = dist_checkpointing.load(_state(actor, moments, loading=True), str(saved))
    (chunk,) = actor._chunks
    unwrap(chunk).load_state_dict(state["model"])
    if moments:
        with torch.no_grad():
            actor.optimizer.inner.load_state_dict(state["optimizer"])
    else:
        actor.optimizer.inner.reload_model_params()
    return {"weights": whole_tensors(actor, "weights"), "metrics": [_learned(actor) for _ in range(2)]}


def _prime(actor: Actor) -> None:
    """Moments that a checkpoint can be read into."""
    for part in actor.optimizer.inner.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state: Mapping[str, torch.Tensor] = {"step": torch.tensor(0.0)}
                part.optimizer.state[parameter] = {**state, **{name: torch.zeros_like(parameter) for name in KEPT}}
