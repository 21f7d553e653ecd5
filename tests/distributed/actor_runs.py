"""What the actor's tests run on ranks: a small model, rows, some updates, and whole tensors gathered back."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema import AlgorithmConfig, Config, KlConfig
from hybridrl.models.families import load_spec
from hybridrl.parallel import groups
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden import gather
from hybridrl.training.actor import Actor, Reference
from hybridrl.training.losses import make_loss
from hybridrl.training.model import training_layout
from hybridrl.training.optimizer import NonFiniteGradientError
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
    config.algorithm.correction.weight = "token"
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
    """The rows with old and reference log-probs a little off the policy's own; some tokens are selected."""
    rng = np.random.default_rng(7)
    own = actor.log_probs(rows)
    return [
        row.with_fields(
            old_log_probs=p + rng.normal(0, noise, len(p)).astype(np.float32),
            ref_log_probs=p + rng.normal(0, noise, len(p)).astype(np.float32),
            importance=np.linspace(0.5, 1.5, len(p)),
            selected=np.arange(len(p)) % 3 == 0,
        )
        for row, p in zip(rows, own, strict=True)
    ]


def whole_tensors(actor: Actor, what: str) -> dict[str, torch.Tensor]:
    """Whole `weights` or `gradients` (not of a distributed optimizer, which shards them) by Hugging Face names."""
    tensors, layout = actor.tensors(), actor.layout
    if what == "gradients":
        tensors = {
            name: getattr(t, "main_grad", torch.zeros_like(t)) for name, t in tensors.items()
        }  # buffers have none
        float32 = replace(actor.config, model=replace(actor.config.model, dtype="float32"))
        layout = training_layout(float32, layout.weights.spec, layout.sizes)
    return {tensor.name: value.clone() for tensor, value in gather(layout, tensors, torch.distributed.get_rank())}


def updates(folder: Any, steps: int, seed: int = 0, **options: dict[str, Any]) -> dict[str, Any]:
    """Scores a batch, updates on it `steps` times: metrics of each, first gradient, last weights."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(seed=seed), actor)
    loss = make_loss(actor.config.algorithm, 16)
    scores = actor.score(rows)
    result: dict[str, Any] = {"log_probs": scores.log_probs, "entropy": scores.entropy, "metrics": []}
    for step in range(steps):
        result["metrics"].append(actor.update(rows, loss))
        if step == 0 and not actor.config.optimizer.distributed:
            result["gradients"] = whole_tensors(actor, "gradients")
    result["weights"] = whole_tensors(actor, "weights")
    return result


def distinct_parameters(actor: Actor) -> int:
    """Elements of the whole model, each counted once."""
    return sum(tensor.size for tensor in actor.layout.weights)


def norm_of_ones(folder: Any, **options: dict[str, Any]) -> tuple[float, int]:
    """The norm that clipping uses where every gradient element of every parameter is 1, and the element count."""
    actor = make_actor(folder, **options)
    actor.optimizer.zero_grad()
    pieces: dict[str, list[Any]] = {}
    for piece in actor.layout.pieces(torch.distributed.get_rank()):
        pieces.setdefault(piece.param, []).append(piece)
    for name, tensor in actor.tensors().items():
        for piece in pieces[name]:  # not the padding of the vocabulary, whose gradient is always 0
            tensor.main_grad[piece.slices] = 1.0
    return actor.optimizer.step().grad_norm, distinct_parameters(actor)


def poisoned(folder: Any, bad_steps: tuple[int, ...], steps: int, **options: dict[str, Any]) -> dict[str, Any]:
    """Updates of which some have a NaN in rank 1's gradient of the output layer: metrics, and weights before each."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), actor)
    loss = make_loss(actor.config.algorithm, 16)
    inner, count = actor.optimizer.inner.prepare_grads, -1

    def prepare() -> bool:
        nonlocal count
        count += 1
        result = inner()
        if count in bad_steps and torch.distributed.get_rank() == 1:
            parameter = actor.optimizer.inner.chained_optimizers[0].get_parameters()[0]
            parameter.grad[0] = float("nan")
        return result

    actor.optimizer.inner.prepare_grads = prepare
    found: dict[str, Any] = {"weights": [whole_tensors(actor, "weights")], "metrics": [], "error": None}
    for _ in range(steps):
        try:
            found["metrics"].append(actor.update(rows, loss))
        except NonFiniteGradientError as error:
            found["error"] = str(error)
            break
        found["weights"].append(whole_tensors(actor, "weights"))
    found["skipped"] = actor.optimizer.skipped
    return found


def broken_weights(folder: Any, steps: int, **options: dict[str, Any]) -> str:
    """What the error says where a weight of the first layer is NaN."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), actor)
    name = next(name for name in actor.tensors() if name.endswith("linear_qkv.weight"))
    with torch.no_grad():
        actor.tensors()[name].fill_(float("nan"))
    try:
        for _ in range(steps):
            actor.update(rows, make_loss(actor.config.algorithm, 16))
    except NonFiniteGradientError as error:
        return str(error)
    return ""


def scored(folder: Any, rows: list[Row], **options: dict[str, Any]) -> tuple[Any, Any]:
    """Log-probs and entropies of an actor, and of a reference made after the actor was updated."""
    actor = make_actor(folder, **options)
    before = actor.score(rows)
    actor.update(with_old_log_probs(rows, actor), make_loss(actor.config.algorithm, 16))
    changed = actor.log_probs(rows)
    reference = Reference(actor.config, actor.layout.weights.spec, actor.layout.sizes, folder=folder)
    return before, (changed, reference.log_probs(rows))


def masked_out(folder: Any, lengths: tuple[int, ...], **options: dict[str, Any]) -> tuple[dict[str, float], bool]:
    """Metrics of an update on rows that train nothing, and whether any gradient was not 0."""
    actor = make_actor(folder, **options)
    rows = [replace(row, mask=np.zeros(len(row), np.bool_)) for row in make_rows(lengths=lengths)]
    metrics = actor.update(with_old_log_probs(rows, actor), make_loss(actor.config.algorithm, 16))
    return metrics, any(bool(t.main_grad.any()) for t in actor.tensors().values())


def balance_gradients(folder: Any, rows: list[Row], **options: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The load-balancing loss of a second update on rows that train nothing, and its gradients."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs([replace(row, mask=np.zeros(len(row), np.bool_)) for row in rows], actor)
    for _ in range(2):
        metrics = actor.update(rows, make_loss(actor.config.algorithm, 16))
    return metrics["loss/aux"], whole_tensors(actor, "gradients")


def biases(folder: Any, rows: list[Row], steps: int, **options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The routers' correction biases after each of some updates."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(rows, actor)
    found = []
    for _ in range(steps):
        actor.update(rows, make_loss(actor.config.algorithm, 16))
        weights = whole_tensors(actor, "weights")
        found.append({name: value for name, value in weights.items() if name.endswith("correction_bias")})
    return found


def after_a_detour(folder: Any, detour: int, **options: dict[str, Any]) -> dict[str, Any]:
    """An update after `detour` others at a learning rate of 0 whose moments are then forgotten."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), actor)
    loss = make_loss(actor.config.algorithm, 16)
    for _ in range(detour):
        actor.update(rows, loss, lr=0.0)
    if detour:
        actor.optimizer.forget()
    return {"metrics": actor.update(rows, loss), "weights": whole_tensors(actor, "weights")}
