"""What the dry run's tests measure on ranks: bytes that an actor really holds."""

from typing import Any

import torch

from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs


def _storages(tensors: Any) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held(folder: Any, **options: dict[str, Any]) -> dict[str, int]:
    """Bytes of each owner on this rank after an update."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), actor)
    actor.update(rows, make_loss(actor.config.algorithm, 16))
    parts = actor.optimizer.inner.chained_optimizers
    shards = {id(p): p for part in parts for group in part.optimizer.param_groups for p in group["params"]}
    states = [part.optimizer.state[p] for part in parts for p in part.optimizer.state]
    buffers = [b for chunk in actor._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    low = actor.config.model.dtype != "float32"
    return {
        "parameters": _storages(actor.tensors().values()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "masters": _storages(shards.values()) if low else 0,
        "moments": sum(_storages([s["exp_avg"], s["exp_avg_sq"]]) for s in states),
    }


def kept(folder: Any, lengths: tuple[int, ...], **options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that the forward pass of one micro-batch keeps for the backward pass, and the tokens of it."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(lengths=lengths), actor)
    own = {t.untyped_storage().data_ptr() for t in actor.tensors().values()}
    found: dict[int, int] = {}
    at_loss: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    loss = make_loss(actor.config.algorithm, 16)
    run = actor._passes.run

    def measured(rows: Any, plan: Any, fields: Any, consume: Any, **options: Any) -> None:
        assert plan.steps == 1

        def noting(*batch: Any) -> torch.Tensor:
            at_loss.append(sum(found.values()))
            return consume(*batch)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(rows, plan, fields, noting, **options)

    actor._passes.run = measured  # type: ignore[method-assign]
    actor.update(rows, loss)
    return at_loss[-1], sum(lengths)
