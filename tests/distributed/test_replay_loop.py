"""Routing replay in the loop: the engine's experts in the trainer's passes, and those of the trainer's first pass."""

from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import launch

R3 = ("algorithm.routing_replay=r3", "rollout.routed_experts=true")
BF16 = "model.dtype=bfloat16"


def test_trainer_and_engine_take_the_same_experts(pool: WorkerPool, tmp_path: Path) -> None:
    records = launch(pool, tmp_path / "r3", *R3, "trainer.export_final=false")
    plain = launch(pool, tmp_path / "none", "trainer.export_final=false")
    assert all(record["routing/replayed"] > 0.8 for record in records)  # all but the last token of each sample
    # In float32 both choose alike, so nothing is changed, and the run is the one without replay.
    assert [record["routing/changed"] for record in records] == [0, 0, 0]
    for ours, theirs in zip(records, plain, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["reward/mean"] == theirs["reward/mean"]


def test_replay_lowers_the_mismatch_of_a_run_in_bfloat16(pool: WorkerPool, tmp_path: Path) -> None:
    few = ("trainer.export_final=false", "trainer.prompts_per_step=16", "rollout.n=8", "trainer.steps=2")
    records = launch(pool, tmp_path / "r3", BF16, *R3, *few)
    plain = launch(pool, tmp_path / "none", BF16, *few)
    assert any(record["routing/changed"] > 0 for record in records)
    first, other = records[0], plain[0]  # of the same weights and samples
    assert first["reward/mean"] == other["reward/mean"]
    assert first["mismatch/logprob_abs_mean"] <= other["mismatch/logprob_abs_mean"]


def test_updates_take_the_experts_of_the_first_pass(pool: WorkerPool, tmp_path: Path) -> None:
    records = launch(
        pool,
        tmp_path / "r2",
        "algorithm.routing_replay=r2",
        "trainer.mini_batch_prompts=2",
        "trainer.export_final=false",
    )
    assert all(record["routing/replayed"] == 1 for record in records)
