"""SGLang in the ranks over its life: sleep and wake, new weights in mid-generation, aborts, refusals, its traces."""

import os
import random
import signal
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Finish
from tests.distributed.pool import WorkerPool
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
VARIANT = "qwen3_moe"
MIB = 2**20


@pytest.fixture(autouse=True)
def _folder() -> None:
    support.folder(VARIANT)


def _rss() -> float:
    return float(psutil.Process().memory_info().rss / MIB)


def _cycles(count: int, kv_tokens: int) -> dict[str, Any]:
    requests = support.requests(3, temperature=1.0, max_new_tokens=6)
    awake, asleep, same = [], [], []
    with support.opened(VARIANT, kv_tokens=kv_tokens, release_weights=True) as engine:
        expected = support.tokens(engine.generate(requests))
        weights = {name: tensor.clone() for name, tensor in engine.parameters().items()}
        for buffer in engine._kv._buffers:
            buffer.fill_(1.0)  # every page of the pool is touched
        engine.flush()
        full = _rss()
        places = [buffer.data_ptr() for buffer in engine._kv._buffers]
        for version in range(1, count + 1):
            engine.sleep()
            asleep.append(_rss())
            engine.wake()
            assert places == [buffer.data_ptr() for buffer in engine._kv._buffers]
            for name, tensor in engine.parameters().items():
                tensor.copy_(weights[name])
            engine.wake()  # it is awake: the weights stay
            engine.publish(version)
            same.append(support.tokens(engine.generate(requests)) == expected)
            awake.append(_rss())
        return {"kv": engine.kv_bytes / MIB, "full": full, "awake": awake, "asleep": asleep, "same": all(same)}


def test_twenty_cycles_of_sleep_leave_memory_flat_and_outputs_equal(pool: WorkerPool) -> None:
    for result in pool.run(_cycles, world=1, count=20, kv_tokens=200_000):
        assert result["same"]
        assert result["kv"] > 48
        assert result["full"] - result["asleep"][0] > 0.9 * result["kv"]
        assert abs(result["asleep"][-1] - result["asleep"][2]) < 16
        assert abs(result["awake"][-1] - result["awake"][2]) < 16


def _latents_asleep(variant: str, **cut: int) -> list[bool]:
    requests = support.requests(4, temperature=0.0)
    right = []
    with support.opened(variant, version=None, release_weights=True, **cut) as engine:
        for version in range(3):
            seed = version or None
            support.write(engine, support.checkpoint(variant, seed))
            engine.publish(version)
            model = support.reference(variant, seed)
            samples = engine.generate(requests)
            right.append(all(s.response_ids == support.logits(model, s).argmax(-1).tolist() for s in samples))
            engine.sleep()
            assert engine.cache_bytes == 0
            engine.wake()
            for tensor in engine.parameters().values():
                tensor.fill_(float("nan"))
            assert engine.cache_bytes == engine.kv_bytes > 0
    return right


@pytest.mark.parametrize("variant", ["deepseek_moe", pytest.param("moonlight_moe", marks=pytest.mark.full)])
def test_latent_attention_serves_new_weights_after_each_sleep(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    assert pool.run(_latents_asleep, world=2, variant=variant, tp=2) == [[True] * 3] * 2


def _new_weights_in_mid_generation(cut: dict[str, int]) -> list[Any]:
    old, new = support.reference(VARIANT), support.reference(VARIANT, seed=5)
    requests = support.requests(6, temperature=0.0, max_new_tokens=24)
    with support.opened(VARIANT, version=3, max_running_requests=4, **cut) as engine:
        engine.submit(requests)
        for _ in range(9):
            engine.step()
        held = {(t.request.prompt.id): len(t.tokens) for t in engine._live.values()}
        with pytest.raises(EngineStateError, match="in flight"):
            engine.publish(4)
        with pytest.raises(ValueError, match="in_place"):
            engine.pause("in_place")
        engine.pause()
        with pytest.raises(EngineStateError, match="paused"):
            engine.step()
        engine.sleep()
        engine.wake()
        with pytest.raises(EngineStateError, match="publish before resume"):
            engine.resume()
        support.write(engine, support.checkpoint(VARIANT, seed=5))
        engine.publish(4)
        engine.resume()
        while engine.step():
            pass
        samples = engine.take()
    wrong = []
    for sample in samples:
        k = held[sample.prompt.id]
        expected = torch.cat([support.logits(old, sample)[:k], support.logits(new, sample)[k:]])
        if expected.argmax(-1).tolist() != sample.response_ids:
            wrong.append(f"prompt {sample.prompt.id}: tokens")
        if sample.versions != [3] * k + [4] * (24 - k):
            wrong.append(f"prompt {sample.prompt.id}: versions {sample.versions} after {k} tokens")
    counts = sorted(held.values())
    assert counts[0] == 0, "some requests must still be queued"
    assert counts[-1] > 4, "some must be well under way"
    return [len(samples), wrong]


@pytest.mark.parametrize(("world", "cut"), [(1, {"tp": 1}), (2, {"tp": 2, "ep": 2})])
def test_weights_change_in_mid_generation_and_no_token_is_lost(
    pool: WorkerPool, world: int, cut: dict[str, int]
) -> None:
    assert pool.run(_new_weights_in_mid_generation, world=world, cut=cut) == [[6, []]] * world


def _log_probs_follow_versions() -> float:
    models = {0: support.reference(VARIANT), 1: support.reference(VARIANT, seed=5)}
    with support.opened(VARIANT) as engine:
        engine.submit(support.requests(4, temperature=1.0, max_new_tokens=20))
        for _ in range(7):
            engine.step()
        engine.pause()
        support.write(engine, support.checkpoint(VARIANT, seed=5))
        engine.publish(1)
        engine.resume()
        while engine.step():
            pass
        worst = 0.0
        for sample in engine.take():
            assert set(sample.versions) == {0, 1}
            rows = torch.stack([support.logits(models[v], sample)[i] for i, v in enumerate(sample.versions)])
            expected = rows.log_softmax(-1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(sample.log_probs)).abs().max()))
    return worst


def test_log_probs_are_of_the_weights_that_drew_the_token(pool: WorkerPool) -> None:
    assert pool.run(_log_probs_follow_versions, world=1)[0] < 1e-4


def _aborts(limit: int) -> list[str]:
    requests = support.requests(4, temperature=1.0, max_new_tokens=limit)
    wrong = []
    with support.opened(VARIANT, tp=2, max_running_requests=2) as engine:
        whole = support.tokens(engine.generate(requests))
        for steps in (0, 1, 5, limit - 1):
            for repeat in range(2):
                engine.flush()  # else a cached prefix would save steps
                engine.submit(requests[:2])
                for _ in range(steps):
                    engine.step()
                samples = engine.abort()
                for sample, expected in zip(samples, whole, strict=False):
                    if sample.finish is not Finish.ABORT or sample.response_ids != expected[:steps]:
                        wrong.append(f"abort {repeat} after {steps} steps, prompt {sample.prompt.id}: {sample}")
                if len(samples) != 2 or engine.take():
                    wrong.append(f"{len(samples)} samples")
        if support.tokens(engine.generate(requests)) != whole:
            wrong.append("generation after the aborts differs")
    return wrong


def test_an_abort_keeps_exactly_the_tokens_so_far(pool: WorkerPool) -> None:
    assert pool.run(_aborts, world=2, limit=12) == [[], []]


def _abort_some() -> None:
    requests = support.requests(4, n=2, temperature=1.0, max_new_tokens=12)
    with support.opened(VARIANT, max_running_requests=3) as engine:
        whole = {(s.prompt.id, s.index): s.response_ids for s in engine.generate(requests)}
        engine.submit(requests)
        for _ in range(4):
            engine.step()
        engine.pause()  # those that ran are queued now, with tokens
        ended = engine.abort({(0, 0), (1, 1), (3, 1)})
        assert [(s.prompt.id, s.index) for s in ended] == [(0, 0), (1, 1), (3, 1)]
        assert len(ended[0].response_ids) > 0, "a retracted request keeps its tokens"
        assert ended[2].response_ids == [], "this one was never started"
        engine.resume()
        while engine.step():
            pass
        rest = engine.take()
        assert [(s.prompt.id, s.index) for s in rest] == [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]
        for sample in rest:
            assert sample.response_ids == whole[sample.prompt.id, sample.index]


def test_some_requests_are_aborted_and_the_others_go_on(pool: WorkerPool) -> None:
    pool.run(_abort_some, world=1)


def _states() -> None:
    requests = support.requests(2)
    with support.opened(VARIANT, version=None, release_weights=True) as engine:
        assert engine.version is None
        with pytest.raises(EngineStateError, match="no weights are in service"):
            engine.generate(requests)
        support.write(engine, support.checkpoint(VARIANT))
        engine.publish(1)
        expected = support.tokens(engine.generate(requests))
        engine.sleep()
        engine.sleep()
        assert engine.version is None
        with pytest.raises(EngineStateError, match="asleep"):
            engine.generate(requests)
        with pytest.raises(EngineStateError, match="asleep"):
            engine.publish(2)
        with pytest.raises(EngineStateError, match="released"):
            engine.parameters()
        with pytest.raises(EngineStateError, match="wake_weights before wake_cache"):
            engine.wake_cache()
        assert engine.cache_bytes == 0
        engine.wake_weights()
        with pytest.raises(EngineStateError, match="asleep"):
            engine.generate(requests)
        engine.wake_cache()
        assert engine.cache_bytes == engine.kv_bytes
        for tensor in engine.parameters().values():
            tensor.fill_(torch.nan)  # what waking may leave there
        with pytest.raises(EngineStateError, match="no weights are in service"):
            engine.generate(requests)
        engine.publish(2)
        with pytest.raises(FloatingPointError, match=r"prompt 0, sample 0: the logits of token 0 .* not finite"):
            engine.generate(requests)
        engine.abort()
        support.write(engine, support.checkpoint(VARIANT))
        engine.publish(3)
        assert support.tokens(engine.generate(requests)) == expected
        engine.submit(requests)
        with pytest.raises(EngineStateError, match="2 requests are in flight"):
            engine.sleep()
        with pytest.raises(EngineStateError, match="2 requests are in flight"):
            engine.generate(requests)
        engine.abort()


def test_calls_out_of_order_are_refused(pool: WorkerPool) -> None:
    pool.run(_states, world=1)


def _prefixes() -> None:
    new = support.reference(VARIANT, seed=5)
    requests = support.requests(3, temperature=0.0)
    long = [r for r in requests if len(r.prompt.token_ids) > 10]
    with support.opened(VARIANT) as engine:
        engine.generate(long)
        engine.generate(long)
        assert engine.cached_tokens > 0
        engine.cached_tokens = 0
        support.write(engine, support.checkpoint(VARIANT, seed=5))
        engine.publish(1)
        for _ in range(2):
            samples = engine.generate(long)
            assert [support.logits(new, s).argmax(-1).tolist() for s in samples] == support.tokens(samples)
            assert {v for s in samples for v in s.versions} == {1}
        engine.flush()
        engine.cached_tokens = 0
        engine.generate(long)
        assert engine.cached_tokens == 0


def test_no_prefix_survives_new_weights(pool: WorkerPool) -> None:
    pool.run(_prefixes, world=1)


def _limits() -> None:
    model = support.reference(VARIANT)
    with support.opened(VARIANT, kv_tokens=support.MAX_POSITIONS, max_running_requests=8) as engine:
        (prompt,) = [p for p in support.prompts(6) if len(p.token_ids) == 8]
        (request, *_) = support.requests(1, temperature=0.0)
        request = replace(request, prompt=prompt)

        def run(**params: Any) -> Any:
            return engine.generate([replace(request, params=replace(request.params, **params))])[0]

        whole = run(max_new_tokens=1000)  # the context ends it, and the KV cache holds just that
        assert (len(whole.response_ids), whole.finish) == (support.MAX_POSITIONS - 8, Finish.LENGTH)
        assert support.logits(model, whole).argmax(-1).tolist() == whole.response_ids
        empty = run(max_new_tokens=0)
        assert (empty.response_ids, empty.finish) == ([], Finish.LENGTH)
        stop = whole.response_ids[6]
        first = whole.response_ids.index(stop)
        stopped = run(stop_token_ids=(stop,))
        assert (stopped.response_ids, stopped.finish) == (whole.response_ids[: first + 1], Finish.STOP)
        assert run(max_new_tokens=first + 1, stop_token_ids=(stop,)).finish is Finish.STOP
        # the model's own EOS ids end nothing that they were not asked to
        many = engine.generate(support.requests(6, n=8, temperature=2.0, max_new_tokens=40))
        assert any({1, 2} & set(s.response_ids[:-1]) for s in many)
        full = replace(prompt, token_ids=(5,) * support.MAX_POSITIONS)
        assert engine.generate([replace(request, prompt=full)])[0].response_ids == []


def test_responses_end_at_stops_and_limits(pool: WorkerPool) -> None:
    pool.run(_limits, world=1)


def _pressure() -> bool:
    requests = support.requests(6, n=2, temperature=1.0, max_new_tokens=80, stop_token_ids=(49,))
    with support.opened(VARIANT, tp=2, kv_tokens=4096, max_running_requests=12) as engine:
        expected = support.tokens(engine.generate(requests))
    tight = {"schedule_conservativeness": 0.01, "chunked_prefill_size": 16}
    with support.opened(VARIANT, tp=2, kv_tokens=300, max_running_requests=12, server_args=tight) as engine:
        engine.submit(requests)
        retracted = 0
        while engine.step():
            retracted = max([retracted, *(t.retractions for t in engine._live.values())])
        assert retracted > 0, "the KV cache was never too small"
        return support.tokens(engine.take()) == expected


def test_requests_retracted_for_want_of_memory_are_not_changed(pool: WorkerPool) -> None:
    assert pool.run(_pressure, world=2) == [True, True]


def _host_state() -> None:
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1]

    def state() -> dict[str, Any]:
        return {
            "random": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "torch": torch.get_rng_state().tolist(),
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "environment": dict(os.environ),
            "signals": [signal.getsignal(s) for s in signals],
        }

    def threads() -> set[str]:
        return {t.name for t in threading.enumerate() if "tqdm" not in t.name}

    from hybridrl.rollout.sglang import internals  # noqa: F401 - importing prepares the environment

    before, running = state(), threads()
    with support.opened(VARIANT, tp=2) as engine:
        engine.generate(support.requests(2, temperature=1.0))
        after = state()
        assert {k for k in before if before[k] != after[k]} == set()
        assert threads() <= running
        with pytest.raises(RuntimeError, match="close it"):
            type(engine)(support.options(VARIANT))
        one = torch.ones(1, requires_grad=True)
        torch.distributed.all_reduce(total := torch.ones(1))
        (one * 2).backward()
        assert (float(total), float(one.grad)) == (2.0, 2.0)


def test_the_process_is_left_as_it_was(pool: WorkerPool) -> None:
    pool.run(_host_state, world=2)


def _refused() -> None:
    from hybridrl.rollout.sglang.engine import SGLangEngine

    with pytest.raises(ValueError, match=r"schedule_polic: .*did you mean 'schedule_policy'"):
        SGLangEngine(support.options(VARIANT, server_args={"schedule_polic": "lpm"}))
    with pytest.raises(ValueError, match=r"world=1 .*tp=2"):
        SGLangEngine(support.options(VARIANT, tp=2))
    with support.opened(VARIANT, server_args={"schedule_policy": "lpm"}) as engine:
        requests = support.requests(1)
        (request,) = requests
        with pytest.raises(ValueError, match="no tokens"):
            engine.generate([replace(request, prompt=replace(request.prompt, token_ids=()))])
        with pytest.raises(ValueError, match="top_p=0"):
            engine.generate([replace(request, params=replace(request.params, top_p=0.0))])
        assert len(engine.generate(requests)) == 1


def test_mistakes_are_refused_and_leave_the_engine_whole(pool: WorkerPool) -> None:
    pool.run(_refused, world=1)
