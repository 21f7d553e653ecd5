"""Hugging Face folders that a run writes as it goes hold the weights of their step, for transformers to load."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hybridrl.config.load import compose
from tests.distributed.actor_runs import make_rows
from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH

WORDS = (
    *("recipe=grpo_tiny_moe", "warm_start.steps=2", "warm_start.batch_size=8", "trainer.prompts_per_step=4"),
    *("rollout.n=4", "rewards.workers=1", "optimizer.lr=1e-2", "optimizer.schedule=constant", "trainer.steps=4"),
    *("checkpoint.hf_every=2", "trainer.export_final=false", BY_LENGTH),
)
VOCABULARY = 19
ROWS = make_rows(VOCABULARY)


def scored(overrides: list[str]) -> dict[int, list[np.ndarray]]:
    """Trains; the log-probs of some rows after each step, by the trainer."""
    from hybridrl.session import Session
    from hybridrl.train import reinforce

    found: dict[int, list[np.ndarray]] = {}

    class Scored(Session):
        def _safe_point(self, step: int) -> None:
            super()._safe_point(step)
            with self.hybrid.training_phase():
                found[step] = [np.asarray(one) for one in self.actor.score(ROWS).log_probs]

    with Scored(compose(overrides)) as session:
        reinforce(session)
    return found


def by_transformers(folder: Path) -> list[np.ndarray]:
    """The same by the model of a folder: entry i is token i's, after those before it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    found = []
    for row in ROWS:
        ids = torch.from_numpy(np.asarray(row.token_ids))[None]
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        own = log_probs.gather(1, ids[0, 1:, None])[:, 0].numpy()
        found.append(np.concatenate([[0.0], own]))
    return found


def furthest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b)[row.mask].max(initial=0.0)) for a, b, row in zip(one, other, ROWS, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2", "parallel.ep=2", "memory.parameters=single"),
        ("parallel.tp=1", "parallel.ep=1", "parallel.pp=2"),
        pytest.param(("parallel.tp=2", "parallel.ep=2", "model.parameter_layout=megatron"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_export_has_the_logits_of_its_step(pool: WorkerPool, tmp_path: Path, layout: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    logits, *_ = pool.run(scored, world=2, overrides=[*WORDS, *layout, f"trainer.output_dir={run}"])
    folders = sorted((run / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["hf-00000002", "hf-00000004"]
    for step, folder in zip((2, 4), folders, strict=True):
        loaded = by_transformers(folder)
        assert furthest(loaded, logits[step]) < 2e-5
        assert furthest(loaded, logits[step - 1]) > 1e-3
        assert len(AutoTokenizer.from_pretrained(folder)) == VOCABULARY
        assert GenerationConfig.from_pretrained(folder).eos_token_id == 1
