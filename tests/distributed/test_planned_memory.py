"""The dry run's bytes against those that training really holds."""

import json

import pytest

from hybridrl.config.load import compose
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import load_spec
from hybridrl.planning.activations import activations
from hybridrl.planning.estimate import estimate
from hybridrl.planning.hardware import find_hardware
from hybridrl.planning.layouts import Layouts, trained_weights, training_shard
from hybridrl.planning.memory import trained
from tests.distributed import planned_runs
from tests.distributed.actor_runs import make_config
from tests.distributed.test_train import SMALL, launch
from tests.models.tiny import tiny_folder

WIDE = {"hidden_size": 128, "head_dim": 32, "vocab_size": 512}
ADAM = {"name": "adam", "lr": 1e-3}
WORLDS = {
    "one": (1, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2-ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
    "dp4-ep2": (4, {"ep": 2}),
}
CASES = [
    pytest.param(world, dtype, distributed, marks=() if world in ("tp2-ep2", "dp2") else pytest.mark.full)
    for world in WORLDS
    for dtype in ("float32", "bfloat16")
    for distributed in (False, True)
]


@pytest.mark.parametrize(("world", "dtype", "distributed"), CASES)
def test_parameters_gradients_and_optimizer_are_as_planned(pool, world, dtype, distributed):
    size, parallel = WORLDS[world]
    options = {
        "parallel": parallel,
        "optimizer": {**ADAM, "distributed": distributed},
        "model": {"dtype": dtype, "parameter_layout": "engine"},
    }
    folder = tiny_folder("qwen3_moe", **WIDE)
    measured = pool.run(planned_runs.held, world=size, folder=folder, **options)
    config = make_config(size, **options)
    layouts = Layouts(config, trained_weights(load_spec(folder), config), transformer_engine=False)
    for rank, found in enumerate(measured):
        planned = trained(config, layouts, training_shard(layouts, rank))
        for owner, size_now in found.items():
            assert getattr(planned, owner) == pytest.approx(size_now, rel=0.02), (rank, owner)


LENGTHS = (40, 100, 60, 56)
SHAPES = {
    "wide MoE": ("qwen3_moe", WIDE),
    # SmolLM2-135M grown to experts, with fewer layers and tokens to choose from.
    "SmolLM2 MoE": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 768,
            "hidden_size": 576,
            "head_dim": 64,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "dense": ("qwen3", WIDE),
    "dense without norms of heads": ("llama", WIDE),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_as_planned(pool, shape, recompute):
    options = {
        "model": {"recompute": recompute},
        "trainer": {"max_tokens_per_micro_batch": sum(LENGTHS)},
        "optimizer": ADAM,
    }
    variant, settings = SHAPES[shape]
    folder = tiny_folder(variant, **settings)
    ((measured, tokens),) = pool.run(planned_runs.kept, world=1, folder=folder, lengths=LENGTHS, **options)
    config = make_config(1, **options)
    assert tokens == config.trainer.max_tokens_per_micro_batch
    spec = trained_weights(load_spec(folder), config).spec
    assert activations(config, spec, 0, fused=False).kept == pytest.approx(measured, rel=0.25)


NAMES = {"masters": "master weights", "engine": "engine weights"}
"""Owners that the ledger calls otherwise."""


def test_the_ledger_of_a_run_is_as_planned(pool, tmp_path):
    launch(pool, tmp_path / "run", "trainer.export_final=false", "trainer.steps=2")
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    counted = {line["event"]: line["owners"] for line in lines if line["step"] == 2}
    config = compose(["recipe=grpo_tiny_moe", *SMALL])
    spec = load_spec(builtin.resolve(config.model.path, cache_folder()))
    planned = estimate(config, trained_weights(spec, config), find_hardware("h100"), cuda=False).memory.phases
    for phase, event, owners in (
        ("update", "trained", ("parameters", "gradients", "masters", "moments")),
        ("rollout", "synced", ("parameters", "engine")),
    ):
        for owner in owners:
            found = counted[event][NAMES.get(owner, owner)]
            assert planned[phase].get(owner, 0) == pytest.approx(found, rel=0.02), (phase, owner)
