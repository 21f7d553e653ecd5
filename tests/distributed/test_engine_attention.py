"""Attention in the engine's order: key and value heads that several ranks train stay equal, and move as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.reshard.golden import differing_replicas
from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder

QKV = "decoder.layers.1.self_attention.linear_qkv."


def train(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Replicas that differ after these steps, how far the replicated rows moved, and what the padding holds."""
    actor = make_actor(folder, **options)
    names = [QKV + "weight"] + [QKV + "bias"] * (QKV + "bias" in actor.tensors())
    before = {name: actor.tensors()[name].detach().clone() for name in names}
    rows = with_old_log_probs(make_rows(), actor)
    for _ in range(steps):
        actor.update(rows, make_loss(actor.config.algorithm, 16))
    tensors, layout = actor.tensors(), actor.layout
    replicated = {name: tensors[name].replicated for name in names}  # type: ignore[attr-defined]
    at = dist.get_rank() * layout.padded_vocabulary // layout.sizes.tp
    padding = [tensors[n][max(0, layout.weights.spec.vocab_size - at) :] for n in tensors if "embedding" in n]
    return {
        "differing": differing_replicas(layout, tensors, dist.get_rank()),
        "moved": [float((tensors[n] - before[n])[replicated[n].first :].abs().max()) for n in names],
        "copies": [mark.copies for mark in replicated.values()],
        "rows": [len(before[n]) - replicated[n].first for n in names],
        "padding": [bool(rows.any()) for rows in padding],
    }


@pytest.mark.parametrize(
    ("model", "distributed", "dtype"),
    [("llama_biased", False, "float32"), ("qwen3_moe", True, "float32"), ("qwen3_moe", True, "bfloat16")],
)
def test_replicas_of_heads_stay_equal_bit_for_bit(pool: WorkerPool, model: str, distributed: bool, dtype: str) -> None:
    folder = tiny_folder(model, dtype)
    options = {
        "parallel": {"tp": 4},
        "model": {"parameter_layout": "engine", "dtype": dtype},
        "optimizer": {"distributed": distributed, "lr": 0.01},
    }
    for found in pool.run(train, 4, folder=folder, steps=3, **options):
        assert found["differing"] == []
        assert min(found["moved"]) > 1e-3
        assert set(found["copies"]) == {2}
        assert set(found["rows"]) == {16}  # one key head and one value head of 8 rows
        assert not any(found["padding"])


def heads_of(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    """What the fused projections hold, on this rank, and which of them are marked as replicas."""
    tensors = make_actor(folder, **options).tensors()
    return [(*t.shape, int(hasattr(t, "replicated"))) for name, t in tensors.items() if name.startswith(QKV)]


@pytest.mark.parametrize(("tp", "rows", "replicated"), [(1, 96, 0), (2, 48, 0), (4, 32, 1)])
def test_a_rank_has_whole_heads(pool: WorkerPool, tp: int, rows: int, replicated: int) -> None:
    options = {"parallel": {"tp": tp}, "model": {"parameter_layout": "engine"}}
    for found in pool.run(heads_of, tp, folder=tiny_folder("llama_biased"), **options):
        assert found == [(rows, 32, replicated), (rows, replicated)]


def gradient_parts(folder: Path, **options: Any) -> list[torch.Tensor]:
    """Gradients of the replicated rows after one update."""
    actor = make_actor(folder, **options)
    actor.update(with_old_log_probs(make_rows(), actor), make_loss(actor.config.algorithm, 16))
    weight: Any = actor.tensors()[QKV + "weight"]
    return [weight.main_grad[weight.replicated.first :].clone()]


def test_replicas_have_the_sum_of_their_gradients(pool: WorkerPool) -> None:
    options = {"parallel": {"tp": 4}, "model": {"parameter_layout": "engine"}, "optimizer": {"clip_grad": 0.0}}
    first, second, third, fourth = pool.run(gradient_parts, 4, folder=tiny_folder("qwen3_moe"), **options)
    assert torch.equal(first[0], second[0])
    assert torch.equal(third[0], fourth[0])
    assert not torch.equal(first[0], third[0])
