"""SGLang loads, by its own loader, what a run exports as it goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH
from tests.distributed.test_train import train
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
PROMPTS = [[3, 14, 5, 17], [8, 13, 9, 17], [4, 4, 13, 6, 6, 17]]
NEW = 12
LOADED = """
import json, os, sys
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
from hybridrl.rollout.sglang import internals

if __name__ == "__main__":
    engine = internals.engine_class()(
        model_path=sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
        attention_backend="torch_native", disable_custom_all_reduce=True, disable_overlap_schedule=True,
        disable_cuda_graph=True, grammar_backend="none", log_level="error", random_seed=0,
    )
    params = {"temperature": 0.0, "max_new_tokens": int(sys.argv[3]), "ignore_eos": True}
    found = engine.generate(input_ids=json.loads(sys.argv[2]), sampling_params=params, return_logprob=True)
    told = [[[t[1], t[0]] for t in one["meta_info"]["output_token_logprobs"]] for one in found]
    engine.shutdown()
    print(json.dumps(told), flush=True)
"""
LAYOUTS = [
    ("parallel.tp=2", "parallel.ep=2"),
    pytest.param(("parallel.tp=1", "parallel.ep=1", "parallel.pp=2"), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sglang_serves_an_export_as_transformers_does(
    pool: WorkerPool, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    words = ("recipe=grpo_tiny_moe", "warm_start.steps=2", "warm_start.batch_size=8", "trainer.prompts_per_step=4")
    more = (
        "rollout.n=4",
        "rewards.workers=1",
        "optimizer.lr=1e-2",
        "trainer.steps=2",
        "checkpoint.hf_every=2",
        BY_LENGTH,
    )
    pool.run(train, world=2, overrides=[*words, *more, *layout, f"trainer.output_dir={tmp_path / 'run'}"])
    folder, script = tmp_path / "run" / "checkpoints" / "hf-00000002", tmp_path / "serve.py"
    script.write_text(LOADED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    served = subprocess.run(
        [sys.executable, script, folder, json.dumps(PROMPTS), str(NEW)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert served.returncode == 0, served.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, found in zip(PROMPTS, json.loads(served.stdout.splitlines()[-1]), strict=True):
        tokens = [token for token, _ in found]
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1], -1)
        assert len(tokens) == NEW
        assert tokens == rows.argmax(-1).tolist()
        assert torch.allclose(rows.max(-1).values, torch.tensor([value for _, value in found]), atol=1e-5)
