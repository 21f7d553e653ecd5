"""Evaluation measures the weights after a step, as transformers generates from them, and changes nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.checkpoint.manifest import checkpoints, read_manifest
from hybridrl.config.schema import DataConfig
from hybridrl.data.rows import load_rows
from hybridrl.rewards.judges.exact import exact
from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import SMALL, check_alike, launch, steady

ROWS = 24
LEARNT = (*SMALL, "warm_start.steps=25", "warm_start.batch_size=64", "optimizer.lr=1e-3", "trainer.steps=3")
MEASURED = ("evaluation.every=2", "evaluation.path=builtin:tiny_sums", f"evaluation.size={ROWS}")


def greedy_score(folder: Path) -> float:
    """What the exported model gets by transformers' own generation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = load_rows(DataConfig(path="builtin:tiny_sums"))[:ROWS]
    scores = []
    for row in rows:
        ids = torch.tensor([tokenizer(row.fields["prompt"])["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        scores.append(exact(text, str(row.fields["answer"]), {}))
    return sum(scores) / len(scores)


def parted(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of the evaluation, and the others, of each step."""
    found = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in records]
    return found, [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in steady(records)]


@pytest.mark.parametrize(
    "memory", ["keep", *(pytest.param(way, marks=pytest.mark.full) for way in ("offload", "single"))]
)
def test_the_weights_after_a_step_are_measured_and_training_is_what_it_was(
    pool: WorkerPool, tmp_path: Path, memory: str
) -> None:
    words = (f"memory.parameters={memory}", "checkpoint.best_metric=eval/reward/mean", "checkpoint.keep_last=3")
    plain = launch(pool, tmp_path / "plain", f"memory.parameters={memory}", small=LEARNT, every=1)
    measured, others = parted(launch(pool, tmp_path / "measured", *words, *MEASURED, small=LEARNT, every=1))
    assert others == steady(plain)
    check_alike(tmp_path / "plain", tmp_path / "measured")
    assert [bool(found) for found in measured] == [False, True, True]
    assert measured[2]["eval/prompts"] == ROWS
    assert 0 < measured[2]["eval/reward/mean"] == pytest.approx(greedy_score(tmp_path / "measured" / "hf"))
    kept = [read_manifest(folder).metric for folder in checkpoints(tmp_path / "measured" / "checkpoints")]
    assert kept == [None, measured[1]["eval/reward/mean"], measured[2]["eval/reward/mean"]]


def test_several_samples_of_a_prompt_differ_and_the_best_is_told(pool: WorkerPool, tmp_path: Path) -> None:
    words = ("evaluation.n=4", "evaluation.temperature=0.8", "evaluation.top_p=0.9", "trainer.steps=1")
    ((found,), _) = parted(launch(pool, tmp_path / "run", *MEASURED, *words, small=LEARNT, every=1))
    assert 0 < found["eval/reward/mean"] < found["eval/reward/best"] <= 1
    assert found["eval/rollout/duplicates"] < 0.9
    assert found["eval/reward/errors"] == 0
