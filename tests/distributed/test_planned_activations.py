"""The dry run's activations, and the peak of an update, against what autograd and the process really hold."""

from pathlib import Path
from typing import Any

import pytest

from hybridrl.models.families import load_spec
from hybridrl.planning.activations import activations, micro_batches
from hybridrl.planning.layouts import Layouts, trained_weights, training_shard
from hybridrl.planning.memory import trained
from tests.distributed import planned_runs
from tests.distributed.actor_runs import make_config
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder

LENGTHS = (40, 100, 60, 56)
WIDE = {"hidden_size": 128, "head_dim": 32, "vocab_size": 512}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide MoE": ("qwen3_moe", WIDE),
    # SmolLM2-135M grown to experts, with fewer layers and tokens to choose from, and heads that TP 2 divides.
    "SmolLM2 MoE": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 768,
            "hidden_size": 576,
            "head_dim": 64,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "DeepSeek": (
        "deepseek_moe",
        {
            "hidden_size": 256,
            "vocab_size": 4096,
            "moe_intermediate_size": 256,
            "intermediate_size": 512,
            "kv_lora_rank": 64,
            "q_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
    "dense": ("qwen3", WIDE),
    "dense without norms of heads": ("llama", WIDE),
}
LAYOUTS = {
    "one": (1, {}),
    "tp2 ep2": (2, {"tp": 2, "ep": 2}),
    "tp2 etp2": (2, {"tp": 2, "etp": 2}),
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
}
RECOMPUTE = ("none", "selective", "full")
CASES = [
    *((shape, "one", recompute) for shape in SHAPES for recompute in RECOMPUTE),
    *((shape, cut, "none") for shape in ("SmolLM2 MoE", "DeepSeek") for cut in LAYOUTS if cut != "one"),
    ("SmolLM2 MoE", "pp2", "full"),
    ("SmolLM2 MoE", "cp2", "full"),
]
QUICK = [
    ("SmolLM2 MoE", "one", "none"),
    ("wide MoE", "one", "full"),
    ("DeepSeek", "cp2", "none"),
    ("SmolLM2 MoE", "tp2 ep2", "none"),
    ("SmolLM2 MoE", "pp2", "full"),
]


def options_of(cut: str, recompute: str) -> tuple[int, tuple[int, ...], dict[str, dict[str, Any]]]:
    """Ranks, rows that fill each micro-batch, and the configuration."""
    world, parallel = LAYOUTS[cut]
    replicas = world // (parallel.get("tp", 1) * parallel.get("cp", 1) * parallel.get("pp", 1))
    tokens = sum(LENGTHS)
    options = {
        "parallel": parallel,
        "model": {"recompute": recompute},
        "trainer": {"max_tokens_per_micro_batch": tokens // parallel.get("cp", 1), "prompts_per_step": 1},
        "rollout": {"n": 12, "max_prompt_length": tokens // 4, "max_response_length": 0},
        "optimizer": {"name": "adam", "lr": 1e-3},
    }
    return world, LENGTHS * replicas * parallel.get("pp", 1), options


@pytest.mark.parametrize(
    ("shape", "cut", "recompute"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES],
)
def test_autograd_keeps_what_was_planned(pool: WorkerPool, shape: str, cut: str, recompute: str) -> None:
    world, lengths, options = options_of(cut, recompute)
    variant, settings = SHAPES[shape]
    folder = tiny_folder(variant, **settings)
    config = make_config(world, **options)
    weights = trained_weights(load_spec(folder), config)
    layouts = Layouts(config, weights, transformer_engine=False)
    found = pool.run(planned_runs.saved, world=world, folder=folder, lengths=lengths, **options)
    for rank, (measured, steps) in enumerate(found):
        assert steps == LAYOUTS[cut][1].get("pp", 1)
        assert micro_batches(config) >= steps  # the pipeline is as full
        planned = activations(config, weights.spec, layouts.sizes.coordinates(rank).pp, fused=False)
        assert planned.saved == pytest.approx(measured, rel=0.25), rank


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full"])
@pytest.mark.parametrize(
    "cut", ["one", *(pytest.param(cut, marks=pytest.mark.full) for cut in ("tp2 ep2", "pp2", "cp2"))]
)
def test_an_update_makes_the_process_grow_as_planned(pool: WorkerPool, cut: str, recompute: str) -> None:
    if not planned_runs.peaks_start_afresh():
        pytest.skip("the kernel starts no new peak of a process's memory")
    world, lengths, options = options_of(cut, recompute)
    variant, settings = SHAPES["SmolLM2 MoE"]
    folder: Path = tiny_folder(variant, **settings)
    config = make_config(world, **options)
    layouts = Layouts(config, trained_weights(load_spec(folder), config), transformer_engine=False)
    grown = pool.run(planned_runs.resident, world=world, folder=folder, lengths=lengths, **options)
    for rank, measured in enumerate(grown):
        stage = layouts.sizes.coordinates(rank).pp
        planned = trained(config, layouts, training_shard(layouts, rank)).total
        planned += activations(config, layouts.spec, stage, fused=False).total
        assert planned == pytest.approx(measured, rel=0.15), rank
