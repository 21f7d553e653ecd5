"""The loop with SGLang in the trainer's ranks: weights bit for bit after each sync, the outputs of the other engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hybridrl.config.load import compose
from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import launch, train
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
STEPS = 5


def _steps(overrides: list[str]) -> list[str]:
    """Trains, and compares the engine's parameters with the golden path's after every sync."""
    from hybridrl.reshard.golden import golden_sync
    from hybridrl.session import Session
    from hybridrl.train import reinforce

    wrong: list[str] = []

    class Watched(Session):
        @contextmanager
        def rollout_phase(self, version: int) -> Iterator[dict[str, float]]:
            with super().rollout_phase(version) as moved:
                live = self.engine.parameters()
                golden = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
                golden_sync(self.actor.layout, self.actor.tensors(), self.engine.layout, golden, self.rank)
                wrong.extend(f"version {version}: {n}" for n, t in golden.items() if not torch.equal(t, live[n]))
                yield moved

    with Watched(compose(overrides)) as session:
        reinforce(session)
    return wrong


ROLLOUTS = [
    pytest.param(["recipe=grpo_tiny_deepseek", "rollout.tp=2", "rollout.ep=2"], id="latent attention"),
    pytest.param(
        ["recipe=grpo_tiny_deepseek", "rollout.tp=2", "rollout.dp=2", "rollout.ep=2"], id="data-parallel attention"
    ),
    pytest.param(["rollout.tp=2"], id="tp2"),
    pytest.param(["rollout.tp=1"], id="two replicas"),
    pytest.param(["rollout.tp=2", "rollout.ep=2"], id="ep2"),
    pytest.param(["rollout.tp=2", "rollout.ep=2", "reshard.placement=auto"], id="placed", marks=pytest.mark.full),
    pytest.param(["rollout.tp=2", "rollout.sglang.hosting=subprocess"], id="subprocess", marks=pytest.mark.full),
]


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_after_every_sync_the_engine_holds_the_trainers_weights(
    pool: WorkerPool, tmp_path: Path, rollout: list[str]
) -> None:
    overrides = [
        *([] if rollout[0].startswith("recipe=") else ["recipe=grpo_tiny_moe"]),
        "rollout.engine=sglang",
        "parallel.tp=2",
        "parallel.ep=2",
        *rollout,
        "rollout.sglang.kv_tokens=2048",
        "trainer.prompts_per_step=4",
        f"trainer.steps={STEPS}",
        "rewards.workers=1",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    assert pool.run(_steps, world=2, overrides=overrides) == [[], []]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == STEPS
    assert max(record["mismatch/logprob_abs_mean"] for record in records) <= 1e-5


def test_both_engines_train_alike(pool: WorkerPool, tmp_path: Path) -> None:
    records = {
        engine: launch(pool, tmp_path / engine, f"rollout.engine={engine}", "trainer.export_final=false")
        for engine in ("transformers", "sglang")
    }
    for key in ("reward/mean", "response_length/mean", "tokens/generated"):
        assert [r[key] for r in records["sglang"]] == [r[key] for r in records["transformers"]]
    for ours, theirs in zip(records["sglang"], records["transformers"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.learn
@pytest.mark.timeout(1800)
def test_sums_are_learned(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["recipe=grpo_tiny_moe", "rollout.engine=sglang", "rollout.tp=2", f"trainer.output_dir={folder}"]
    pool.run(train, world=2, timeout=1500.0, overrides=overrides)
    rewards = [record["reward/mean"] for record in read_metrics(folder / "metrics.jsonl")]
    begin, end = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert end > begin + 0.2, (begin, end)
