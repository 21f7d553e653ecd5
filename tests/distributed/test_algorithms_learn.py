"""Every algorithm's recipe runs, and those that claim to learn do, within the samples that GRPO takes."""

from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.folders import RECIPES
from hybridrl.config.load import compose
from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import train

BUDGET = 160 * 32 * 8
"""Samples of `grpo_tiny_moe`."""
WINDOW = 5


def launch(pool: WorkerPool, recipe: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    common = [f"recipe={recipe}", f"trainer.output_dir={folder}", "trainer.export_final=false"]
    pool.run(train, world=2, timeout=3000, overrides=[*common, *overrides])
    return read_metrics(folder / "metrics.jsonl")


def generated(recipe: str, records: list[dict[str, Any]]) -> float:
    """Samples that a run drew."""
    config = compose([f"recipe={recipe}"])
    groups = [record.get("sampling/groups", config.trainer.prompts_per_step) for record in records]
    return sum(groups) * config.rollout.n


def rise(records: list[dict[str, Any]]) -> tuple[float, float]:
    rewards = [record["reward/mean"] for record in records]
    return sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW


@pytest.mark.learn
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recipe", ["rloo_tiny_moe", "gspo_tiny_moe", "cispo_tiny_moe", "dapo_tiny_moe"])
def test_the_reward_rises_as_with_grpo(pool: WorkerPool, tmp_path: Path, recipe: str) -> None:
    records = launch(pool, recipe, tmp_path / "run")
    first, last = rise(records)
    print(f"{recipe}: reward {first:.3f} -> {last:.3f}, {generated(recipe, records):.0f} samples of {BUDGET}")
    assert generated(recipe, records) <= BUDGET
    assert first <= 0.6
    assert last >= 0.85


SHORT = ("trainer.steps=2", "trainer.prompts_per_step=8", "trainer.mini_batch_prompts=4", "rewards.workers=1")
WARM = ("warm_start.steps=4", "warm_start.batch_size=16")
ON_POLICY = ("gpg", "opo", "remax")
OTHERS = {"grpo_smollm2_moe"}


@pytest.mark.full
@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*_tiny_moe.yaml") if p.stem not in OTHERS))
def test_every_recipe_of_the_tiny_model_runs(pool: WorkerPool, tmp_path: Path, recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    updates = ["trainer.mini_batch_prompts=8"] if config.algorithm.policy_loss == "policy_gradient" else []
    warm = WARM if config.warm_start.steps else ()
    records = launch(pool, recipe, tmp_path / "run", *SHORT, *warm, *updates)
    assert [record["step"] for record in records] == [1, 2]
