"""SGLang in processes of its own: fed in place, the same tokens as in process, and gone when its parent is."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Finish, Sample
from hybridrl.rollout.stops import decoder
from tests.data.tokenizers import character_tokenizer
from tests.distributed.pool import WorkerPool
from tests.distributed.test_stop import start, wait_for_steps
from tests.models.tiny import FOLDER_VARIABLE
from tests.processes import left_of, left_with, processes_with
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
VARIANT = "qwen3_moe"


def _children() -> set[int]:
    """Ids of all processes that this one has started, and those have."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _serves(variant: str, **cut: int) -> None:
    """Twice new weights, asleep in between; each time the tokens of transformers."""
    from hybridrl.rollout.sglang.process.engine import SGLangProcessEngine

    requests = support.requests(6, temperature=0.0)
    engine = SGLangProcessEngine(support.options(variant, **cut))
    try:
        for version in range(3):
            seed = version or None
            support.write(engine, support.checkpoint(variant, seed))
            engine.publish(version)
            model = support.reference(variant, seed)
            for sample in engine.generate(requests):
                assert sample.response_ids == support.logits(model, sample).argmax(-1).tolist()
            engine.sleep()
            engine.wake()
    finally:
        engine.close()


def _whole_life(tp: int, ep: int, tokenizer: str) -> None:
    from hybridrl.rollout.sglang.process import engine as process_engine

    requests = support.requests(6, n=2, temperature=0.7)
    with support.opened(VARIANT, tp=tp, ep=ep, routed_experts=True) as inside:
        expected = inside.generate(requests)
        weights = {name: tensor.clone() for name, tensor in inside.parameters().items()}
    options = support.options(VARIANT, tp=tp, ep=ep, routed_experts=True, tokenizer=Path(tokenizer))
    with tempfile.TemporaryDirectory() as shared, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_engine, "SHARED_MEMORY", Path(shared))
        before = _children()
        engine = process_engine.SGLangProcessEngine(options)
        started, left = _children(), os.listdir(shared)
    try:
        assert left == [], "the files of the shared weights are left"
        with pytest.raises(EngineStateError, match="no weights are in service"):
            engine.generate(requests)
        support.write(engine, support.checkpoint(VARIANT))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.parameters().items())
        engine.publish(3)
        found = engine.generate(requests)
        assert support.tokens(found) == support.tokens(expected)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-6)
            assert (a.versions, a.finish) == ([3] * 16, Finish.LENGTH)
            assert np.array_equal(a.routed_experts, b.routed_experts)
        _sleeps(engine, requests, support.tokens(expected))
        _changes_weights(engine)
        _aborts(engine)
        _stops(engine, tokenizer)
    finally:
        engine.close()
    assert left_of(started - before) == []


def _has_routes(sample: Sample) -> None:
    tokens = len(sample.prompt.token_ids) + len(sample.response_ids) - 1
    if sample.response_ids:
        assert sample.routed_experts is not None
        assert sample.routed_experts.shape == (tokens, 4, 2)


def _sleeps(engine: Any, requests: list[Any], expected: list[list[int]]) -> None:
    engine.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate(requests)
    assert engine.cache_bytes == 0
    engine.wake_weights()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate(requests)
    engine.wake_cache()
    assert engine.cache_bytes > 0
    with pytest.raises(EngineStateError, match="no weights are in service"):
        engine.generate(requests)
    engine.publish(4)
    assert support.tokens(engine.generate(requests)) == expected


def _changes_weights(engine: Any) -> None:
    """Paused at some token, with new weights from there on."""
    models = {4: support.reference(VARIANT), 5: support.reference(VARIANT, seed=5)}
    requests = support.requests(6, temperature=0.0, max_new_tokens=80)
    engine.submit(requests)
    engine.step()
    engine.pause()
    with pytest.raises(EngineStateError, match="paused"):
        engine.step()
    support.write(engine, support.checkpoint(VARIANT, seed=5))
    engine.publish(5)
    engine.resume()
    while engine.step():
        pass
    for sample in engine.take():
        assert len(sample.response_ids) == min(80, support.MAX_POSITIONS - len(sample.prompt.token_ids))
        assert sample.versions == sorted(sample.versions)
        _has_routes(sample)
        rows = {version: support.logits(model, sample).argmax(-1).tolist() for version, model in models.items()}
        assert sample.response_ids == [rows[version][i] for i, version in enumerate(sample.versions)]
    support.write(engine, support.checkpoint(VARIANT))
    engine.publish(6)


def _aborts(engine: Any) -> None:
    requests = support.requests(6, n=4, temperature=1.0, max_new_tokens=60)
    whole = support.tokens(engine.generate(requests))
    engine.submit(requests)
    engine.step()
    some = engine.abort({(r.prompt.id, r.index) for r in requests[::3]})
    engine.pause()
    rest = engine.abort()
    engine.resume()
    samples = sorted([*some, *rest, *engine.take()], key=lambda s: (s.prompt.id, s.index))
    assert len(samples) == len(requests)
    for sample, tokens in zip(samples, whole, strict=True):
        assert sample.response_ids == tokens[: len(sample.response_ids)]
        assert set(sample.versions) <= {6}
        _has_routes(sample)
    assert support.tokens(engine.generate(requests)) == whole


def _stops(engine: Any, tokenizer: str) -> None:
    from hybridrl.rollout.transformers_engine import TransformersEngine

    embedded = TransformersEngine(support.folder(VARIANT), load=True, tokenizer=tokenizer)
    embedded.publish(0)
    requests = support.requests_with_stops(embedded, decoder(tokenizer))
    ends = [(s.response_ids, s.finish) for s in engine.generate(requests)]
    assert ends == [(s.response_ids, s.finish) for s in embedded.generate(requests)]
    assert {finish for _, finish in ends} == {Finish.STOP, Finish.LENGTH}


def test_an_engine_in_its_own_processes_is_the_one_in_process(pool: WorkerPool, tmp_path: Path) -> None:
    support.folder(VARIANT)
    character_tokenizer().save_pretrained(tmp_path)
    pool.run(_whole_life, world=2, tp=2, ep=2, tokenizer=str(tmp_path))


@pytest.mark.full
def test_latent_attention_is_served_by_processes_of_their_own(pool: WorkerPool) -> None:
    support.folder("deepseek_moe")
    pool.run(_serves, world=2, variant="deepseek_moe", tp=2, ep=2)


PARENT = """
import os, sys, time
import psutil
from hybridrl.rollout.sglang.options import subprocess_args
from hybridrl.rollout.sglang.process.client import ServerProcess
from tests.rollout.sglang import support
if __name__ == "__main__":
    server = ServerProcess(subprocess_args(support.options("qwen3"), 0), None, None)
    print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    support.folder("qwen3")
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "7"}
    assert FOLDER_VARIABLE in environment
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 2, "the server and a scheduler at least"
        parent.send_signal(signal.SIGKILL)
    assert left_of(pids) == []


def _named(mark: Path, word: str) -> list[int]:
    """Processes of the run whose command line has this word; SGLang's own give themselves a name."""
    found = []
    for pid in processes_with(f"HYBRIDRL_TEST_MARK={mark}"):
        try:
            if word in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("hybridrl.rollout.sglang.process.server", id="server"),
        pytest.param("sglang::scheduler", id="scheduler", marks=pytest.mark.full),
    ],
)
def test_a_run_whose_engine_dies_ends_and_says_so(tmp_path: Path, word: str) -> None:
    words = ["rollout.engine=sglang", "rollout.sglang.hosting=subprocess", "rollout.sglang.kv_tokens=2048"]
    run = start(tmp_path, "trainer.steps=5000", "parallel.tp=2", "parallel.ep=2", "rollout.tp=2", *words)
    wait_for_steps(tmp_path, 2)
    os.kill(_named(tmp_path, word)[0], signal.SIGKILL)
    errors = run.communicate(timeout=120)[1]
    assert run.returncode not in (0, None)
    last = [line for line in errors.splitlines() if "Error:" in line][-1]
    assert "ServerError: SGLang's server ended with exit code" in last, errors[-3000:]
    assert left_with(f"HYBRIDRL_TEST_MARK={tmp_path}") == []
