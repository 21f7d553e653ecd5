"""What the actor's tests run on ranks: a small model, a batch of rows, some updates, and whole tensors gathered back."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema import AlgorithmConfig, Config, KlConfig
from hybridrl.models.families import load_spec
from hybridrl.parallel import groups
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden import gather
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row

LENGTHS = (9, 4, 12, 7, 3, 10, 6)


def make_rows(vocab: int = 50, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    """Rows of random tokens, of which about two thirds are trained; the last one trains nothing."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(lengths):
        mask = rng.random(n) < 0.66
        mask[:2] = False
        if i == len(lengths) - 1:
            mask[:] = False
        fields = {"advantages": np.full(n, rng.normal(), np.float32)}
        rows.append(Row(index=i, token_ids=rng.integers(0, vocab, n), mask=mask, fields=fields))
    return rows


def make_config(world: int, **groups_of_options: dict[str, Any]) -> Config:
    """A configuration with these options changed, such as `parallel={"tp": 2}`."""
    config = Config()
    config.model.vocab_multiple = 8
    config.optimizer.lr = 1e-3
    config.optimizer.distributed = False
    config.trainer.ranks_per_node = world
    config.algorithm = AlgorithmConfig(
        entropy_coef=0.01, clip_high=0.3, dual_clip=3.0, kl=KlConfig(where="loss", coef=0.1)
    )
    for group, options in groups_of_options.items():
        for name, value in options.items():
            setattr(getattr(config, group), name, value)
    return config


def make_actor(folder: Any, total_updates: int = 10, **options: dict[str, Any]) -> Actor:
    """An actor on this rank's world."""
    world = torch.distributed.get_world_size()
    config = make_config(world, **options)
    parallel = config.parallel
    sizes = ParallelSizes(world=world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp)
    groups.initialize(sizes, vpp=parallel.vpp)
    return Actor(config, load_spec(folder), sizes, folder=folder, total_updates=total_updates)


def with_old_log_probs(rows: list[Row], actor: Actor, noise: float = 0.15) -> list[Row]:
    """The rows with old and reference log-probs a little off the policy's own."""
    rng = np.random.default_rng(7)
    own = actor.log_probs(rows)
    return [
        row.with_fields(
            old_log_probs=p + rng.normal(0, noise, len(p)).astype(np.float32),
            ref_log_probs=p + rng.normal(0, noise, len(p)).astype(np.float32),
        )
        for row, p in zip(rows, own, strict=True)
    ]


def whole_tensors(actor: Actor, what: str) -> dict[str, torch.Tensor]:
    """Whole `weights` or `gradients` under Hugging Face names."""
    tensors = actor.tensors()
    if what == "gradients":
        tensors = {name: t.main_grad for name, t in tensors.items() if hasattr(t, "main_grad")}
    layout = actor.layout if what == "weights" else replace_dtype(actor)
    return {tensor.name: value.clone() for tensor, value in gather(layout, tensors, torch.distributed.get_rank())}


def replace_dtype(actor: Actor) -> Any:
    """The actor's layout with the gradients' dtype."""
    from hybridrl.training.actor import training_layout

    config = replace(actor.config, model=replace(actor.config.model, dtype="float32"))
    return training_layout(config, actor.layout.weights.spec, actor.layout.sizes)


def updates(folder: Any, steps: int, seed: int = 0, **options: dict[str, Any]) -> dict[str, Any]:
    """Scores a batch, updates on it `steps` times: metrics of each, first gradient, last weights."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(seed=seed), actor)
    loss = make_loss(actor.config.algorithm, 16)
    result: dict[str, Any] = {"log_probs": actor.log_probs(rows), "entropy": actor.score(rows).entropy, "metrics": []}
    for step in range(steps):
        result["metrics"].append(actor.update(rows, loss))
        if step == 0 and not actor.config.optimizer.distributed:
            result["gradients"] = whole_tensors(actor, "gradients")
    result["weights"] = whole_tensors(actor, "weights")
    return result
