"""Whole runs of each kind beside the critic-free ones: what they report, and that they learn."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import launch, steady, train
from tests.models.tiny import make_folder


def run(pool: WorkerPool, recipe: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    parts = [f"recipe={recipe}", f"trainer.output_dir={folder}", *overrides]
    pool.run(train, world=2, overrides=parts, timeout=600)
    return read_metrics(folder / "metrics.jsonl")


def judge_by_length(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    return len(response) % 3


JUDGE = "rewards.judges=[{name: 'tests.distributed.test_objectives:judge_by_length'}]"
"""So that there is something to learn from the first step on."""


def test_a_critic_learns_alone_before_the_policy_does(pool: WorkerPool, tmp_path: Path) -> None:
    options = ("recipe=ppo_tiny_moe", "critic.warmup_steps=1", "optimizer.schedule=constant", JUDGE)
    options += ("algorithm.kl.where=reward", "algorithm.kl.coef=0.1")
    records = launch(pool, tmp_path / "a", *options)
    first, second, third = records
    assert first["value/mean"] == 0
    assert second["value/mean"] != 0
    assert "loss/policy" not in first
    assert all("loss/policy" in record and "loss/value" in record for record in (second, third))
    assert (first["kl/response"], second["kl/response"]) == (0, 0)
    assert third["kl/response"] != 0
    assert first["critic/lr"] == 2e-3
    assert steady(launch(pool, tmp_path / "b", *options)) == steady(records)


def test_a_critic_that_leaves_with_each_rollout_learns_the_same(pool: WorkerPool, tmp_path: Path) -> None:
    options = (
        "recipe=ppo_tiny_moe",
        "critic.warmup_steps=1",
        "trainer.export_final=false",
        "memory.verify=true",
        JUDGE,
    )
    here, away = (
        launch(pool, tmp_path / place, *options, f"memory.critic={place}", f"memory.gradients={gradients}")
        for place, gradients in (("none", "keep"), ("host", "release"))
    )
    assert steady(away) == steady(here)


@pytest.mark.parametrize("recipe", ["cdpo_tiny_moe", "kto_tiny_moe", "rm_tiny_moe"])
def test_a_preference_run_measures_what_it_holds_out(pool: WorkerPool, tmp_path: Path, recipe: str) -> None:
    records = run(pool, recipe, tmp_path / "run", "trainer.steps=12", "preference.holdout_every=5")
    assert records[0]["holdout/start/margin"] == 0
    assert [record["step"] for record in records if "holdout/margin" in record] == [5, 10, 12]
    assert records[-1]["loss/preference"] < records[0]["loss/preference"]
    kind = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())["architectures"][0]
    assert kind.endswith("ForSequenceClassification" if recipe.startswith("rm") else "ForCausalLM")


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_precomputed_references_are_those_of_a_reference_model(pool: WorkerPool, tmp_path: Path, loss: str) -> None:
    options = ("trainer.steps=3", "trainer.update_epochs=2", "trainer.mini_batch_prompts=32")
    found = [
        run(pool, f"{loss}_tiny_moe", tmp_path / kind, f"preference.reference={kind}", *options)
        for kind in ("precomputed", "on_the_fly")
    ]
    for ours, theirs in zip(*map(steady, found), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_a_teacher_that_is_the_policy_teaches_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    options = ("recipe=distill_tiny_moe", "teacher.path=builtin:tiny_moe", "warm_start.steps=0", "trainer.steps=2")
    for record in launch(pool, tmp_path / "run", *options):
        assert record["kl/teacher"] == pytest.approx(0, abs=1e-6)
        assert record["grad_norm"] < 1e-6


def test_a_teacher_of_another_vocabulary_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    make_folder(teacher, "qwen3")
    with pytest.raises(Exception, match=r"teacher\.path=.*a vocabulary of 50 tokens, the policy has"):
        launch(pool, tmp_path / "run", "recipe=distill_tiny_moe", f"teacher.path={teacher}")


def test_a_reward_model_judges_beside_rules(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, "rm_tiny_moe", tmp_path / "rm", "trainer.steps=4")
    model = f"{{name: reward_model, weight: 0.5, args: {{path: '{tmp_path / 'rm' / 'hf'}'}}}}"
    records = launch(pool, tmp_path / "run", f"rewards.judges=[{{name: exact}}, {model}]")
    for record in records:
        assert record["reward/reward_model"] != 0
        expected = record["reward/exact"] + 0.5 * record["reward/reward_model"]
        assert record["reward/mean"] == pytest.approx(expected, abs=1e-6)
    alone = launch(pool, tmp_path / "alone", f"rewards.judges=[{model}]")
    assert alone[0]["reward/mean"] == pytest.approx(0.5 * records[0]["reward/reward_model"], abs=1e-6)


@pytest.mark.learn
def test_ppo_learns_sums_in_the_budget_of_grpo(pool: WorkerPool, tmp_path: Path) -> None:
    records = run(pool, "ppo_tiny_moe", tmp_path / "run")
    assert len(records) == 160
    assert sum(record["reward/mean"] for record in records[-10:]) / 10 >= 0.85
    assert records[-1]["value/explained_variance"] > 0


@pytest.mark.learn
@pytest.mark.parametrize("loss", ["dpo", "cdpo", "ipo", "simpo", "kto"])
def test_preferences_raise_the_margin_on_rows_that_are_held_out(pool: WorkerPool, tmp_path: Path, loss: str) -> None:
    records = run(pool, f"{loss}_tiny_moe", tmp_path / "run")
    assert records[-1]["holdout/margin"] > records[0]["holdout/start/margin"] + 0.2
    if loss != "kto":
        assert records[-1]["holdout/accuracy"] >= 0.9


@pytest.mark.learn
def test_a_reward_model_tells_right_sums_from_wrong_ones(pool: WorkerPool, tmp_path: Path) -> None:
    records = run(pool, "rm_tiny_moe", tmp_path / "run")
    assert records[-1]["holdout/accuracy"] >= 0.95


@pytest.mark.learn
def test_a_student_approaches_its_teacher(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, "sft_tiny_moe", tmp_path / "teacher")
    records = run(pool, "distill_tiny_moe", tmp_path / "run", f"teacher.path={tmp_path / 'teacher' / 'hf'}")
    assert records[-1]["kl/teacher"] < 0.2 * records[0]["kl/teacher"]
    assert records[-1]["reward/mean"] > records[0]["reward/mean"] + 0.2
