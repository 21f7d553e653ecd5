"""Training in bfloat16 starts from the values of the files, not from what the import rounded them to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.training.losses import make_loss
from hybridrl.training.model import training_layout
from tests.distributed import actor_runs
from tests.models.tiny import tiny_folder


def masters_and_files(folder: Path, **options: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By parameter, its master (put together where ranks have shards of it) and the files' values."""
    actor = actor_runs.make_actor(folder, **options)
    rank, config = dist.get_rank(), actor.config
    float32 = replace(config, model=replace(config.model, dtype="float32"))
    exact = training_layout(float32, actor.layout.weights.spec, actor.layout.sizes)
    values = {name: torch.empty(param.shape) for name, param in exact.params(rank).items()}
    import_weights(folder, exact, values, rank, convert=True)
    mine = {
        n: m.detach().flatten() for n, t in actor.tensors().items() if (m := getattr(t, "main_param", None)) is not None
    }
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, mine)
    found = {}
    for name, value in values.items():
        whole = name in mine and mine[name].numel() == value.numel()
        master = mine[name] if whole else torch.cat([s[name] for s in shards if name in s])
        found[name] = master, value.flatten()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("parallel", "layout", "distributed"),
    [
        ({}, "megatron", True),
        ({"ep": 2}, "engine", True),
        ({"tp": 2, "ep": 2}, "megatron", False),
        ({"tp": 2}, "engine", False),
        ({"pp": 2}, "megatron", True),
    ],
)
def test_masters_are_the_values_of_the_files(pool, dtype, parallel, layout, distributed):
    folder = tiny_folder("qwen3_moe_tied", dtype)
    model = {"dtype": "bfloat16", "vocab_multiple": 8, "parameter_layout": layout}
    options = {"parallel": parallel, "optimizer": {"distributed": distributed}, "model": model}
    for found in pool.run(masters_and_files, world=2, folder=folder, **options):
        for name, (master, value) in found.items():
            assert torch.equal(master, value), name
        rounded = [v for _, v in found.values() if not torch.equal(v, v.bfloat16().float())]
        assert bool(rounded) == (dtype != "bfloat16")


def unmoved(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before and after an update at a learning rate of 0."""
    actor = actor_runs.make_actor(folder, model={"dtype": "bfloat16"}, **options)
    before = actor_runs.whole_tensors(actor, "weights")
    rows = actor_runs.with_old_log_probs(actor_runs.make_rows(), actor)
    actor.update(rows, make_loss(actor.config.algorithm, 16))
    return before, actor_runs.whole_tensors(actor, "weights")


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_at_a_rate_of_zero_changes_no_bit(pool, distributed):
    options = {"optimizer": {"distributed": distributed, "lr": 0.0}}
    for before, after in pool.run(unmoved, world=2, folder=tiny_folder("qwen3_moe"), **options):
        assert all(torch.equal(before[name], after[name]) for name in before)
