"""Stacked experts compute what Megatron's experts do, forward and backward, whatever the tokens and sizes."""

from typing import Any

import pytest

from tests.distributed import experts_runs
from tests.distributed.pool import WorkerPool

BATCHES = [(3, 0, 5, 1), (0, 0, 0, 0), (0, 0, 0, 9), (64, 2, 0, 0), (3, 0, 5, 1)]
"""Tokens of each expert; empty ones at every end, none at all, and the first again."""


@pytest.mark.parametrize("expanded", [False, True], ids=["gradient", "expanded gradient"])
@pytest.mark.parametrize(
    ("hidden", "ffn", "dtype", "tolerance"),
    [(32, 24, "float32", 1e-6), (32, 24, "bfloat16", 0.0), (18, 7, "float32", 1e-6), (20, 12, "bfloat16", 0.0)],
    ids=["float32", "bfloat16", "float32, odd sizes", "bfloat16, odd sizes"],
)
def test_equal_to_megatrons_experts(
    pool: WorkerPool, hidden: int, ffn: int, dtype: str, tolerance: float, expanded: bool
) -> None:
    run = {"hidden": hidden, "ffn": ffn, "dtype": dtype, "expanded": expanded}
    (found,) = pool.run(experts_runs.compare, 1, batches=BATCHES, **run)
    for batch, errors in zip(BATCHES, found, strict=True):
        assert all(error <= tolerance for error in errors.values()), (batch, errors)
        assert {"w13", "w2"} <= errors.keys()


@pytest.mark.parametrize(
    ("world", "sizes", "allreduce"),
    [
        (1, {"tp": 1, "ep": 1, "etp": 1}, True),
        (2, {"tp": 1, "ep": 1, "etp": 1}, True),
        (2, {"tp": 2, "ep": 1, "etp": 2}, True),
        (2, {"tp": 2, "ep": 1, "etp": 1}, False),
        (2, {"tp": 1, "ep": 1, "etp": 2}, False),
        (2, {"tp": 1, "ep": 2, "etp": 1}, False),
        (4, {"tp": 2, "ep": 2, "etp": 2}, False),
    ],
)
def test_gradients_are_summed_over_the_experts_replicas(
    pool: WorkerPool, world: int, sizes: dict[str, int], allreduce: bool
) -> None:
    experts, ffn = 8 // sizes["ep"], 32 // sizes["etp"]
    for found in pool.run(experts_runs.marks, world, **sizes):
        assert found["w13"] == [allreduce, True, 1, 2]
        assert found["w2"] == [allreduce, True, 2, 1]
        assert found["shapes"] == [(experts, 2 * ffn, 16), (experts, 16, ffn)]


def test_settings_that_change_the_function_are_refused_together(pool: WorkerPool) -> None:
    options: dict[str, Any] = {"add_bias_linear": True, "glu_linear_offset": 1.0, "moe_apply_probs_on_input": True}
    (told,) = pool.run(experts_runs.refused, 1, **options)
    for name in options:
        assert name in told
    assert "model.parameter_layout=megatron" in told
    assert pool.run(experts_runs.refused, 1) == [""]
