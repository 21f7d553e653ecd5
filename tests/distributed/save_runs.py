"""What ranks run to save an actor and to read it into another layout."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint.load import load_model, load_states, newest_whole
from hybridrl.checkpoint.manifest import read_manifest
from hybridrl.checkpoint.save import Saver
from hybridrl.checkpoint.shards import Model
from hybridrl.config.schema import CheckpointConfig
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, whole_tensors, with_old_log_probs


def model_of(actor: Actor) -> Model:
    parts = actor.optimizer.inner.chained_optimizers
    return Model("policy", actor.layout, dist.get_rank(), actor.tensors, parts)


def learned(actor: Actor) -> dict[str, float]:
    rows = with_old_log_probs(make_rows(), actor)
    return actor.update(rows, make_loss(actor.config.algorithm, 16))


def save(folder: Path, out: Path, asynchronous: bool, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Trains, saves, and trains on while the save is in flight; the weights then, and what two more steps give."""
    actor = make_actor(folder, **options)
    for _ in range(steps):
        learned(actor)
    saver = Saver(out, CheckpointConfig(asynchronous=asynchronous), dist.get_rank(), print)
    weights = whole_tensors(actor, "weights")
    saver.start(steps, [model_of(actor)], ({"counter": {"value": 7}}, {"rank": dist.get_rank()}), None)
    metrics = [learned(actor) for _ in range(2)]
    return {"weights": weights, "metrics": metrics, "folder": saver.wait(), "after": whole_tensors(actor, "weights")}


def load(folder: Path, saved: Path, moments: bool = True, **options: Any) -> dict[str, Any]:
    """Loads into an actor of other weights; the weights then, and what two steps give."""
    actor = make_actor(folder, **options)
    with torch.no_grad():
        for tensor in actor.tensors().values():
            tensor.fill_(0.37)
    found = newest_whole(saved, print)
    assert found is not None
    load_model(found, read_manifest(found), model_of(actor), optimizer=moments)
    weights = whole_tensors(actor, "weights")
    return {
        "weights": weights,
        "metrics": [learned(actor) for _ in range(2)],
        "after": whole_tensors(actor, "weights"),
        "states": load_states(found),
    }
