"""Runs of every kind go on bit for bit: critics, preferences, reward models, other memory policies and controllers."""

from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH, SMALL, check_alike, launch, steady

TINY = ("trainer.prompts_per_step=8", "preference.holdout=12", "optimizer.lr=3e-3", "data.seed=3")


def kind(recipe: str, *words: str) -> tuple[str, ...]:
    return (f"recipe={recipe}", *SMALL[1:], BY_LENGTH, *words)


KINDS = {
    "critic": kind("ppo_tiny_moe", "critic.warmup_steps=1", "trainer.mini_batch_prompts=2"),
    "critic that learns alone": kind("ppo_tiny_moe", "critic.warmup_steps=3"),
    "single copy": kind("grpo_tiny_moe", "memory.parameters=single", "memory.optimizer=host"),
    "single copy in bfloat16": kind(
        "grpo_tiny_moe", "memory.parameters=single", "model.dtype=bfloat16", "parallel.tp=2", "memory.optimizer=disk"
    ),
    "offloaded critic": kind("ppo_tiny_moe", "critic.warmup_steps=0", "memory.critic=host", "memory.optimizer=host"),
    "steered divergence": kind("grpo_adaptive_kl_tiny_moe", "memory.reference=host"),
    "routing biases": kind("grpo_tiny_deepseek", "model.router_bias_rate=0.01"),
    "routing replay": kind("grpo_r3_tiny_moe"),
    "pipeline": kind("grpo_tiny_moe", "parallel.ep=1", "parallel.pp=2"),
    "synchronous": kind("grpo_tiny_moe", "checkpoint.asynchronous=false"),
    "demonstrations": ("recipe=sft_tiny_moe", "trainer.prompts_per_step=8", "optimizer.lr=3e-3", "data.seed=3"),
    "preferences": ("recipe=dpo_tiny_moe", *TINY),
    "verdicts": ("recipe=kto_tiny_moe", *TINY),
    "reward model": ("recipe=rm_tiny_moe", *TINY),
}
QUICK = ("single copy",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in KINDS]
)
def test_every_kind_of_run_goes_on_bit_for_bit(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    small = KINDS[name]
    expected = launch(pool, tmp_path / "straight", "trainer.steps=4", small=small)
    before = launch(pool, tmp_path / "stopped", "trainer.steps=4", small=small, stop=4)
    found = launch(pool, tmp_path / "stopped", "trainer.steps=4", small=small)
    assert (len(before), len(found)) == (3, 4)
    assert max(record.get("grad_norm", 0.0) for record in expected) > 0
    assert steady(found) == steady(expected)
    check_alike(tmp_path / "stopped", tmp_path / "straight")
