"""What a checkpoint holds of a run: its models, and everything else that a step depends on, by name."""

from typing import TYPE_CHECKING

from hybridrl.checkpoint.resume import Checkpoints
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
    found = Checkpoints(config, session.folder, session.note)

    def add(name: str, model: "TrainedModel", counters: str) -> None:
        parts = model.optimizer.inner.chained_optimizers
        found.add(Model(name, model.layout, rank, model.tensors, parts))
        found.states.add(counters, model.optimizer)

    add("policy", session.trained, "optimizer")
    if session.critic is not None:
        add("critic", session.critic, "critic_optimizer")
    if session.reference is not None and config.warm_start.steps:  # else it is the model's folder
        found.add(Model("reference", session.trained.layout, rank, session.reference.tensors))
    found.states.add("random", RandomStates(groups.random_states()), per_rank=True)
    for name in PARTS:
        if hasattr(session, name):
            found.states.add(name, getattr(session, name))
    return found
