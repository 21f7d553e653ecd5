"""What the tests of routing replay run on ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hybridrl.models.megatron.router import routers
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row
from tests.distributed.actor_runs import make_actor, make_rows, whole_tensors, with_old_log_probs


def random_routes(rows: list[Row], layers: int, experts: int, k: int, moe_layers: Any = None) -> list[Row]:
    """The rows with random experts, the last token of each left free; dense layers hold none."""
    rng = np.random.default_rng(5)
    found = []
    for row in rows:
        routes = np.stack([[rng.permutation(experts)[:k] for _ in range(layers)] for _ in range(len(row))])
        routes = routes.astype(np.int8)
        routes[-1] = -1
        if moe_layers is not None:
            routes[:, ~np.asarray(moe_layers)] = -1
        found.append(replace(row, routes=routes))
    return found


def replayed(folder: Any, source: str, steps: int = 1, **options: Any) -> dict[str, Any]:
    """Scores and updates on rows whose experts are `given` at random, or those of an `own` first pass.

    What routers really used in the last update is told by a hook on their output.
    """
    actor = make_actor(folder, **options)
    spec = actor.layout.weights.spec
    rows = with_old_log_probs(make_rows(), actor)
    if source == "given":
        rows = random_routes(rows, spec.num_layers, spec.moe.num_experts, spec.moe.top_k, spec.moe.layers)
    kept = actor.score(rows, keep_routes=True)
    if source == "own":
        rows = [replace(row, routes=routes) for row, routes in zip(rows, kept.routes, strict=True)]
    loss = make_loss(actor.config.algorithm, 16)
    result: dict[str, Any] = {"log_probs": kept.log_probs, "routes": kept.routes, "metrics": []}
    maps: list[tuple[int, bool, torch.Tensor]] = []

    def note(module: Any, _: Any, output: Any) -> None:
        maps.append((module.layer_number, torch.is_grad_enabled(), output[1].clone()))

    handles = [router.register_forward_hook(note) for router in routers(actor._chunks)]
    for step in range(steps):
        maps.clear()
        result["metrics"].append(actor.update(rows, loss))
        if step == 0:
            result["gradients"] = whole_tensors(actor, "gradients")
    for handle in handles:
        handle.remove()
    result["weights"] = whole_tensors(actor, "weights")
    result["maps"] = maps
    return result


def refused(folder: Any, **options: Any) -> list[str]:
    """What is said of rows of which some have no experts, and of experts in another number."""
    actor = make_actor(folder, **options)
    spec = actor.layout.weights.spec
    rows = random_routes(make_rows(), spec.num_layers, spec.moe.num_experts, spec.moe.top_k)
    told = []
    for wrong in (
        [replace(rows[0], routes=None), *rows[1:]],
        [replace(row, routes=row.routes[..., :1]) for row in rows],
    ):
        try:
            actor.score(wrong)
        except ValueError as error:
            told.append(str(error))
    actor.score(rows)
    return told


def mismatches(folder: Any, **options: Any) -> dict[str, float]:
    """Mean |log-prob difference| of a pass and one on slightly other weights, without and with replay."""
    actor = make_actor(folder, **options)
    rows = make_rows(lengths=(60, 60, 60, 60))
    first = actor.score(rows, keep_routes=True)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for tensor in actor.tensors().values():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            tensor.mul_(1 + 2.0**-8 * noise)
    again = [replace(row, routes=routes) for row, routes in zip(rows, first.routes, strict=True)]
    found = {}
    for name, those in (("free", rows), ("replayed", again)):
        other = actor.score(those).log_probs
        found[name] = float(np.mean([np.abs(a - b).mean() for a, b in zip(first.log_probs, other, strict=True)]))
    return found
