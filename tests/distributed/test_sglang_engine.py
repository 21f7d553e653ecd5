"""SGLang in the ranks against transformers: tokens, log-probs, seeds, at every way of cutting it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.rollout.samples import Finish
from tests.data.tokenizers import character_tokenizer
from tests.distributed.pool import WorkerPool
from tests.models.tiny import FAMILY_NAMES
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
SERVED = (*FAMILY_NAMES, "qwen3_moe_tied", "qwen3_tied", "qwen2_tied", "glm4_moe", "deepseek_moe", "moonlight_moe")
CUTS = [
    pytest.param(2, {"tp": 2}, id="tp2"),
    pytest.param(2, {"tp": 1}, id="two replicas"),
    pytest.param(2, {"tp": 2, "ep": 2}, id="ep2"),
    pytest.param(2, {"tp": 2, "ep": 2, "ranks": (1, 0)}, id="ranks in each other's slots"),
    pytest.param(4, {"tp": 2, "ep": 2, "ranks": (2, 0, 3, 1)}, id="ranks placed over replicas", marks=pytest.mark.full),
    pytest.param(4, {"tp": 2}, id="two replicas of tp2", marks=pytest.mark.full),
    pytest.param(4, {"tp": 4, "ep": 2}, id="ep2 of tp4", marks=pytest.mark.full),
    pytest.param(4, {"tp": 4}, id="tp4 over 2 kv heads", marks=pytest.mark.full),
]


def _against_transformers(variant: str, **cut: Any) -> dict[str, Any]:
    model = support.reference(variant)
    with support.opened(variant, **cut) as engine:
        greedy = engine.generate(support.requests(6, temperature=0.0))
        expected = [support.logits(model, s).argmax(-1).tolist() for s in greedy]
        samples = {t: engine.generate(support.requests(6, n=2, temperature=t)) for t in (1.0, 0.7)}
        return {
            "greedy": support.tokens(greedy) == expected,
            "errors": [support.log_prob_error(model, s, t) for t, s in samples.items()],
            "lengths": {len(s) for s in support.tokens(samples[1.0])},
            "tokens": support.tokens(samples[1.0]),
            "replica": (engine.replica, engine.num_replicas),
        }


def _check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["greedy"]
        assert max(result["errors"]) < 1e-5
        assert result["lengths"] == {16}
        assert result["tokens"] == results[0]["tokens"]


@pytest.mark.parametrize("variant", SERVED)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    _check(pool.run(_against_transformers, world=1, variant=variant))


@pytest.mark.parametrize(
    ("variant", "cut"),
    [
        ("deepseek_moe", {"tp": 2, "ep": 2}),
        pytest.param("moonlight_moe", {"tp": 2}, marks=pytest.mark.full),
        pytest.param("glm4_moe", {"tp": 2, "ep": 2}, marks=pytest.mark.full),
    ],
)
def test_cut_engines_of_other_families_agree_with_transformers(
    pool: WorkerPool, variant: str, cut: dict[str, int]
) -> None:
    support.folder(variant)
    _check(pool.run(_against_transformers, world=2, variant=variant, **cut))


@pytest.mark.parametrize(("world", "cut"), CUTS)
def test_cut_engines_agree_with_transformers_on_every_rank(pool: WorkerPool, world: int, cut: dict[str, Any]) -> None:
    support.folder("qwen3_moe")
    results = pool.run(_against_transformers, world=world, variant="qwen3_moe", **cut)
    _check(results)
    slots = list(cut.get("ranks", range(world)))
    assert [r["replica"] for r in results] == [(slots.index(r) // cut["tp"], world // cut["tp"]) for r in range(world)]


def _seeded() -> list[bool]:
    requests = support.requests(5, n=3, temperature=1.0)
    with support.opened("qwen3_moe", tp=2) as engine:
        first = support.tokens(engine.generate(requests))
        torch.manual_seed(17 + torch.distributed.get_rank())
        engine.flush()
        backwards = support.tokens(engine.generate(requests[::-1]))[::-1]
        alone = [support.tokens(engine.generate([r]))[0] for r in requests[:4]]
        every = support.gathered(first)
    with support.opened("qwen3_moe", tp=2, max_running_requests=2) as engine:
        narrow = support.tokens(engine.generate(requests))
    return [backwards == first, alone == first[:4], narrow == first, all(t == first for t in every)]


def test_tokens_follow_from_the_seed_alone(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_seeded, world=2) == [[True] * 4] * 2


def _diversity() -> tuple[int, int]:
    with support.opened("qwen3_moe") as engine:
        samples = engine.generate(support.requests(1, n=8, temperature=1.0))
        again = engine.generate(support.requests(1, n=8, temperature=1.0))
        assert support.tokens(samples) == support.tokens(again)
        return len({tuple(t) for t in support.tokens(samples)}), engine.cached_tokens


def test_samples_of_a_group_differ(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_diversity, world=1)[0][0] == 8


def _embedded_engine() -> bool:
    from hybridrl.rollout.transformers_engine import TransformersEngine

    requests = support.requests(6, n=2, temperature=0.8, top_p=0.9, top_k=20, stop_token_ids=(1, 2, 30))
    embedded = TransformersEngine(support.folder("qwen3_moe"), load=True)
    embedded.publish(0)
    expected = embedded.generate(requests)
    with support.opened("qwen3_moe") as engine:
        found = engine.generate(requests)
    close = all(
        torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5)
        for a, b in zip(expected, found, strict=True)
    )
    same = [
        (a.response_ids, a.finish, a.versions) == (b.response_ids, b.finish, b.versions)
        for a, b in zip(expected, found, strict=True)
    ]
    return close and all(same)


def test_both_engines_draw_the_same_tokens_for_the_same_seed(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_embedded_engine, world=1) == [True]


def _stop_strings(tokenizer: str) -> list[str]:
    from hybridrl.rollout.collect import check_samples
    from hybridrl.rollout.stops import decoder
    from hybridrl.rollout.transformers_engine import TransformersEngine

    decode = decoder(tokenizer)
    embedded = TransformersEngine(support.folder("qwen3_moe"), load=True, tokenizer=tokenizer)
    embedded.publish(0)
    requests = support.requests_with_stops(embedded, decode)
    expected = embedded.generate(requests)
    with support.opened(
        "qwen3_moe", tp=2, tokenizer=Path(tokenizer), server_args={"chunked_prefill_size": 16}
    ) as engine:
        found = engine.generate(requests)
        check_samples(requests, found, decode)
    assert {s.finish for s in found} == {Finish.STOP, Finish.LENGTH}
    return [
        f"prompt {a.prompt.id}, sample {a.index}: {b.response_ids}, {b.finish}; expected {a.response_ids}, {a.finish}"
        for a, b in zip(expected, found, strict=True)
        if (a.response_ids, a.finish, len(a.log_probs)) != (b.response_ids, b.finish, len(b.log_probs))
    ]


def test_stop_strings_end_responses_as_in_the_embedded_engine(pool: WorkerPool, tmp_path: Path) -> None:
    support.folder("qwen3_moe")
    character_tokenizer().save_pretrained(tmp_path)
    assert pool.run(_stop_strings, world=2, tokenizer=str(tmp_path)) == [[], []]


def _truncated(**params: Any) -> float:
    from hybridrl.rollout import sampling

    model = support.reference("qwen3")
    requests = support.requests(4, n=2, **params)
    worst = 0.0
    with support.opened("qwen3") as engine:
        for request, sample in zip(requests, engine.generate(requests), strict=True):
            rows = support.logits(model, sample)
            filters = sampling.Filters.of([request.params] * len(rows))
            expected = sampling.log_probs(rows, filters).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(sample.log_probs)).abs().max()))
    return worst


def test_log_probs_are_of_the_cut_and_renormalised_distribution(pool: WorkerPool) -> None:
    support.folder("qwen3")
    assert pool.run(_truncated, world=1, temperature=0.9, top_p=0.7, top_k=10)[0] < 1e-5


def _routed() -> float:
    model = support.reference("qwen3_moe")
    spec = model.config
    agreement = []
    with support.opened("qwen3_moe", tp=2, ep=2, routed_experts=True) as engine:
        for sample in engine.generate(support.requests(5, temperature=1.0)):
            ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
            with torch.no_grad():
                routers = model(ids[:, :-1], output_router_logits=True).router_logits
            expected = torch.stack([r.topk(spec.num_experts_per_tok).indices.sort(-1).values for r in routers], 1)
            found = torch.from_numpy(sample.routed_experts).long().sort(-1).values
            assert found.shape == expected.shape, (found.shape, expected.shape)
            agreement.append((found == expected).float().mean())
    return float(torch.stack(agreement).mean())


def test_routed_experts_are_those_of_the_router(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_routed, world=2) == [1.0, 1.0]


def _routes_like_the_embedded_engine(tight: dict[str, Any]) -> list[str]:
    from hybridrl.rollout.transformers_engine import TransformersEngine

    variant = "qwen3_moe"
    requests = support.requests(6, n=2, temperature=1.0, max_new_tokens=30)
    embedded = TransformersEngine(support.folder(variant), load=True, routed_experts=True)
    embedded.publish(0)
    expected = {(s.prompt.id, s.index): s for s in embedded.generate(requests)}
    wrong = []
    with support.opened(variant, routed_experts=True, max_running_requests=8, **tight) as engine:
        for _ in range(2):  # the second time prompts come from the prefix cache
            engine.submit(requests)
            for _ in range(24):
                engine.step()
            engine.pause()
            samples = engine.abort({(0, 0), (2, 1)})
            engine.resume()
            while engine.step():
                pass
            samples += engine.take()
            assert {s.finish for s in samples} == {Finish.ABORT, Finish.LENGTH}
            for sample in samples:
                whole, found = expected[sample.prompt.id, sample.index], sample.routed_experts
                tokens = len(sample.prompt.token_ids) + len(sample.response_ids) - 1
                if whole.response_ids[: len(sample.response_ids)] != sample.response_ids:
                    wrong.append(f"{sample.prompt.id}, {sample.index}: tokens")
                elif not np.array_equal(np.sort(whole.routed_experts[:tokens]), np.sort(found)):
                    wrong.append(f"{sample.prompt.id}, {sample.index}: routes")
    return wrong


SCARCE = {"kv_tokens": 200, "server_args": {"schedule_conservativeness": 0.01, "chunked_prefill_size": 16}}


@pytest.mark.parametrize("tight", [{"kv_tokens": 2048}, SCARCE], ids=["room", "want of memory"])
def test_routes_are_complete_after_pauses_aborts_and_retractions(pool: WorkerPool, tight: dict[str, Any]) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_routes_like_the_embedded_engine, world=1, tight=tight) == [[]]
