"""The parts of the optimizer step that need no Megatron optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.memory.residence import Always
from hybridrl.training.optimizer import Optimizer


def stand_in(**part: Any) -> Any:
    """An optimizer of one part."""
    parts = [SimpleNamespace(**part)]
    inner, config = SimpleNamespace(chained_optimizers=parts), SimpleNamespace(clip_grad=1.0)
    return SimpleNamespace(inner=inner, config=config, residence=Always())


def test_forgetting_takes_back_a_step_that_is_counted_by_group() -> None:
    """As Transformer Engine's and Apex's Adam do, which correct their moments' bias by it."""
    inner = SimpleNamespace(state={"weight": {"exp_avg": 1.0}}, param_groups=[{"step": 5, "lr": 0.1}, {"lr": 0.2}])
    Optimizer.forget(stand_in(optimizer=inner))
    assert inner.state == {}
    assert inner.param_groups == [{"lr": 0.1}, {"lr": 0.2}]


def test_a_rank_without_any_shard_clips_nothing() -> None:
    Optimizer._clip(stand_in(get_parameters=list), norm=5.0)


def test_clipping_scales_every_gradient_alike() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full((2,), 4.0)
    Optimizer._clip(stand_in(get_parameters=lambda: parameters), norm=2.0)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [pytest.approx([2.0] * 2)] * 2 + [None]
