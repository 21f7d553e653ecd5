"""The learning-rate schedule."""

import pytest

from hybridrl.config.schema import OptimizerConfig
from hybridrl.training.lr import lr_at


def test_warm_up_is_linear_and_ends_at_the_peak():
    config = OptimizerConfig(lr=1e-6, warmup_steps=10)
    assert lr_at(6, config, 100) == pytest.approx(6e-7)
    assert [lr_at(s, config, 100) for s in (10, 11, 100)] == pytest.approx([1e-6] * 3)


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_the_floor(schedule, middle):
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=10, schedule=schedule)
    assert lr_at(10, config, 110) == 1.0
    assert lr_at(60, config, 110) == pytest.approx(middle)
    assert lr_at(110, config, 110) == pytest.approx(0.1)
    assert lr_at(500, config, 110) == pytest.approx(0.1)


def test_no_warm_up_starts_at_once():
    assert lr_at(1, OptimizerConfig(lr=0.5), 1) == 0.5
    assert lr_at(1, OptimizerConfig(lr=0.5, schedule="linear"), 1) == 0.0


def test_unknown_schedules_are_named():
    with pytest.raises(ValueError, match=r"optimizer.schedule='step'"):
        lr_at(1, OptimizerConfig(schedule="step"), 10)
