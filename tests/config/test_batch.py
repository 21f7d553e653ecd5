"""Batch arithmetic: prompts, groups, updates and ranks."""

from dataclasses import replace

import pytest

from hybridrl.config.batch import BatchArithmetic, batch_arithmetic
from hybridrl.config.compose import compose
from hybridrl.config.schema import Config


def config(*overrides: str) -> Config:
    return compose(["model.path=builtin:tiny_moe", *overrides])


def test_the_derived_table() -> None:
    batch = batch_arithmetic(
        config("trainer.prompts_per_step=1024", "trainer.mini_batch_prompts=256", "rollout.n=5"), world=8
    )
    assert (batch.samples, batch.updates, batch.samples_per_update, batch.samples_per_rank) == (5120, 4, 1280, 160)
    assert not batch.problems
    rows = {tuple(row.rsplit(maxsplit=1)) for row in str(batch).splitlines()}
    assert {("samples a step", "5120"), ("updates a step", "4"), ("samples a rank an update", "160")} <= rows


def test_model_parallel_ranks_share_samples() -> None:
    assert batch_arithmetic(config("parallel.tp=2", "parallel.pp=2"), world=8).dp == 2


def test_supervised_steps_count_examples() -> None:
    assert (
        batch_arithmetic(config("algorithm=sft", "rollout.n=5", "trainer.prompts_per_step=64"), world=2).samples == 64
    )


def test_every_remainder_is_a_problem() -> None:
    batch = batch_arithmetic(
        config("trainer.prompts_per_step=32", "trainer.mini_batch_prompts=7", "rollout.n=3"), world=2
    )
    assert len(batch.problems) == 2


@pytest.mark.parametrize("override", ["rollout.n=0", "trainer.mini_batch_prompts=0", "parallel.tp=4"])
def test_numbers_that_make_no_batch_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match="no batch arithmetic"):
        batch_arithmetic(config(override), world=2)


def test_several_passes_are_told_and_multiply_the_updates() -> None:
    batch = BatchArithmetic(prompts=32, n=8, mini_batch_prompts=8, dp=2, epochs=3)
    assert batch.updates == 12
    assert batch.samples_per_update == 64
    assert "passes a step" in str(batch)
    assert "passes a step" not in str(replace(batch, epochs=1))
