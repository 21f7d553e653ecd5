"""The nearest change that would fit: the cheapest that helps, and one that really does."""

import pytest

from hybridrl.plan import prepare
from hybridrl.planning.advice import nearest
from hybridrl.planning.estimate import estimate
from hybridrl.planning.layouts import trained_weights
from tests.planning.test_plan import QWEN, planned

WIDE = "trainer.max_tokens_per_micro_batch=32768"
MISFITS = {
    "activations": ([QWEN, "model.recompute=none", WIDE], "model.recompute=full"),
    "a state that stays": ([QWEN, "memory.optimizer=none", "parallel.ep=4"], None),
    "copies of the weights": (
        [QWEN, "memory.parameters=keep", "memory.gradients=keep", "rollout.tp=1", "rollout.ep=1"],
        None,
    ),
    "a cache larger than the device": ([QWEN, "rollout.sglang.kv_tokens=90000000"], "rollout.sglang.kv_tokens="),
    "experts whole on each rank": ([QWEN, "parallel.ep=1", "trainer.nodes=4"], None),
    "state that is not sharded": (
        ["recipe=grpo_mixtral_8x7b", "optimizer.distributed=false", "plan.hardware=h100"],
        None,
    ),
    "a critic beside the policy": (["recipe=ppo_qwen3_8b", "memory.critic=none", "parallel.tp=1", WIDE], None),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith(("activations", "a cache")) else pytest.mark.full)
        for name in MISFITS
    ],
)
def test_what_is_named_fits_once_it_is_done(name: str) -> None:
    overrides, expected = MISFITS[name]
    found = planned(*overrides)
    assert not found.fits
    advice = nearest(found)
    assert advice is not None
    assert str(advice).startswith(expected or "")
    followed = prepare([*overrides, *str(advice).split()])
    assert followed.errors == []
    assert followed.spec is not None
    assert followed.hardware is not None
    weights = trained_weights(followed.spec, followed.config)
    assert estimate(followed.config, weights, followed.hardware).shortages == []


@pytest.mark.parametrize(
    ("overrides", "place", "owners"),
    [
        ([], "host", {"masters", "moments"}),
        (["memory.arena=disk"], "disk", {"masters", "moments"}),
        (["memory.optimizer=disk", "memory.parameters=offload"], "disk", {"masters", "moments"}),
        (
            ["memory.arena=disk", "memory.parameters=offload", "algorithm.kl.where=loss", "algorithm.kl.coef=0.1"],
            "disk",
            None,
        ),
    ],
)
def test_what_leaves_the_device_is_told_by_where_it_goes(
    overrides: list[str], place: str, owners: set[str] | None
) -> None:
    memory = planned(QWEN, "memory.optimizer=auto", *overrides).memory
    assert set(getattr(memory, place)) == (owners or {"masters", "moments", "parameters", "reference"})
