"""What is saved of a run: in a checkpoint its models and everything else that a step depends on, by name; and the
trained model as a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.checkpoint.resume import Checkpoints
from hybridrl.checkpoint.settings import Settings
from hybridrl.checkpoint.shards import Model
from hybridrl.checkpoint.states import RandomStates
from hybridrl.parallel import groups

if TYPE_CHECKING:
    from hybridrl.session import Session
    from hybridrl.training.model import TrainedModel

PARTS = ("prompts", "demonstrations", "preferences", "groups", "kl")
"""Parts of a session that are alike on all ranks, as far as the run has them."""


def checkpoints_of(session: "Session") -> Checkpoints:
    """The checkpoints of a run, which know all that is to be saved. The session has made its models already."""
    config, rank = session.config, session.rank
    lend = None if session.supervised else session.hybrid.lend
    found = Checkpoints(config, session.folder, session.note, lend)

    def add(name: str, model: "TrainedModel", counters: str) -> None:
        parts = model.optimizer.inner.chained_optimizers
        found.add(Model(name, model.layout, rank, model.tensors, parts))
        found.states.add(counters, model.optimizer)

    add("policy", session.trained, "optimizer")
    if session.critic is not None:
        add("critic", session.critic, "critic_optimizer")
    if session.reference is not None and config.warm_start.steps:  # else it is the model's folder
        found.add(Model("reference", session.trained.layout, rank, session.reference.tensors))
    found.states.add("settings", Settings(config, session.note))
    found.states.add("random", RandomStates(groups.random_states()), per_rank=True)
    for name in PARTS:
        if hasattr(session, name):
            found.states.add(name, getattr(session, name))
    return found


def export(session: "Session", folder: Path) -> None:
    """Writes the trained weights as a Hugging Face folder; one that this run has written before stays.

    Every rank calls it. Raises WeightError as `export_weights` does.
    """
    if session.checkpoints.continues and _exists(folder, session):
        return
    dtype = session.config.trainer.export_dtype
    export_weights(
        folder,
        session.trained.layout,
        session.trained.tensors(),
        session.rank,
        source=session.model_folder,
        tokenizer=session.tokenizer_folder,
        dtype=None if dtype == "parameters" else dtype,
    )


def _exists(folder: Path, session: "Session") -> bool:
    """Whether rank 0 sees the folder: file systems need not show it to all at the same time."""
    found = torch.tensor([session.rank == 0 and folder.exists()], dtype=torch.int32, device=session.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())
