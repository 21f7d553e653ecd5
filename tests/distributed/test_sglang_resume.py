"""A stopped run with SGLang in its ranks goes on bit for bit, as the ones with the embedded engine do."""

from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH, SMALL, check_alike, launch, steady
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
WORDS = (*SMALL, BY_LENGTH, "rollout.engine=sglang", "parallel.tp=2", "parallel.ep=2", "rollout.tp=2")


@pytest.mark.parametrize(
    "options",
    [
        ("memory.parameters=single", "memory.optimizer=host"),
        pytest.param(("rollout.ep=2",), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_bit_for_bit(pool: WorkerPool, tmp_path: Path, options: tuple[str, ...]) -> None:
    words = (*options, "rollout.sglang.kv_tokens=2048", "trainer.steps=4")
    expected = launch(pool, tmp_path / "straight", *words, small=WORDS)
    launch(pool, tmp_path / "stopped", *words, small=WORDS, stop=4)
    found = launch(pool, tmp_path / "stopped", *words, small=WORDS)
    assert max(record["grad_norm"] for record in expected) > 0
    assert steady(found) == steady(expected)
    check_alike(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.full
def test_one_beside_goes_on_but_for_rounding(pool: WorkerPool, tmp_path: Path) -> None:
    """Its scheduler batches requests as they arrive, which differs from one run to another, and finds more or fewer of
    their prefixes in its cache."""
    words = ("rollout.sglang.hosting=subprocess", "rollout.sglang.kv_tokens=2048", "trainer.steps=4")
    expected = launch(pool, tmp_path / "straight", *words, small=WORDS)
    launch(pool, tmp_path / "stopped", *words, small=WORDS, stop=4)
    found = launch(pool, tmp_path / "stopped", *words, small=WORDS)
    for one, other in zip(steady(found), steady(expected), strict=True):
        for timed in ("tokens/prompt_cached", "rollout/prefix_hit_rate"):
            del one[timed], other[timed]
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
