"""Data-parallel attention: replicas with requests of their own, whose experts all their ranks compute together."""

from typing import Any

import pytest
import torch

from hybridrl.rollout.samples import Finish, Request
from tests.distributed.pool import WorkerPool
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
WHOLE_HEAD = {"server_args": {"enable_dp_lm_head": True}}
CUTS = [
    pytest.param("qwen3_moe", 2, {"tp": 2, "dp": 2, "ep": 2}, id="qwen3_moe"),
    pytest.param("deepseek_moe", 2, {"tp": 2, "dp": 2, "ep": 2, **WHOLE_HEAD}, id="deepseek, whole head"),
    pytest.param("deepseek_moe", 2, {"tp": 2, "dp": 2}, id="deepseek without ep", marks=pytest.mark.full),
    pytest.param("glm4_moe", 2, {"tp": 2, "dp": 2, "ep": 2}, id="glm", marks=pytest.mark.full),
    pytest.param("qwen3", 2, {"tp": 2, "dp": 2}, id="dense", marks=pytest.mark.full),
    pytest.param("qwen3_moe", 4, {"tp": 2, "dp": 2, "ep": 2}, id="two models", marks=pytest.mark.full),
    pytest.param("deepseek_moe", 4, {"tp": 4, "dp": 2, "ep": 4}, id="attention over two", marks=pytest.mark.full),
    pytest.param(
        "qwen3_moe", 4, {"tp": 4, "dp": 2, "ep": 2, "ranks": (2, 0, 3, 1)}, id="placed", marks=pytest.mark.full
    ),
]


def _share(requests: list[Request], engine: Any, split: str) -> list[Request]:
    """This replica's: every n-th, all but the first on the last, or all on the last and none on the others."""
    last = engine.num_replicas - 1
    owner = {
        "even": lambda i: i % engine.num_replicas,
        "uneven": lambda i: last if i else 0,
        "one has all": lambda _: last,
    }
    return [request for i, request in enumerate(requests) if owner[split](i) == engine.replica]


def _placed(variant: str, **cut: Any) -> dict[str, Any]:
    model = support.reference(variant)
    told: dict[str, Any] = {"responses": {}}
    with support.opened(variant, **cut) as engine:
        told["replica"] = (engine.replica, engine.num_replicas)
        for split in ("even", "uneven", "one has all"):
            greedy = engine.generate(_share(support.requests(6, temperature=0.0), engine, split))
            assert all(s.response_ids == support.logits(model, s).argmax(-1).tolist() for s in greedy)
            drawn = engine.generate(_share(support.requests(6, n=2, temperature=1.0), engine, split))
            assert not drawn or support.log_prob_error(model, drawn, 1.0) < 1e-5
            told["responses"][split] = {(s.prompt.id, s.index): s.response_ids for s in drawn}
    return told


@pytest.mark.parametrize(("variant", "world", "cut"), CUTS)
def test_samples_are_those_of_transformers_wherever_they_are_drawn(
    pool: WorkerPool, variant: str, world: int, cut: dict[str, Any]
) -> None:
    support.folder(variant)
    told = pool.run(_placed, world=world, variant=variant, **cut)
    over = cut["tp"] // cut["dp"]
    slots = list(cut.get("ranks", range(world)))
    assert [t["replica"] for t in told] == [(slots.index(rank) // over, world // over) for rank in range(world)]
    whole = {
        split: {key: ids for t in told for key, ids in t["responses"][split].items()} for split in told[0]["responses"]
    }
    assert len(whole["even"]) == 12
    assert whole["even"] == whole["uneven"] == whole["one has all"]


def _life(variant: str) -> list[str]:
    """Paused, asleep, with new weights, aborted in part and altogether; what is wrong in words."""
    models = {3: support.reference(variant), 4: support.reference(variant, seed=5)}
    wrong = []
    with support.opened(variant, version=3, tp=2, dp=2, ep=2, release_weights=True) as engine:
        requests = support.requests(6, temperature=0.0, max_new_tokens=24)[engine.replica :: 2]
        engine.submit(requests)
        for _ in range(9):
            engine.step()
        engine.pause()
        engine.sleep()
        engine.wake()
        support.write(engine, support.checkpoint(variant, seed=5))
        engine.publish(4)
        engine.resume()
        while engine.step():
            pass
        for sample in engine.take():
            rows = {version: support.logits(model, sample).argmax(-1).tolist() for version, model in models.items()}
            if sample.response_ids != [rows[version][i] for i, version in enumerate(sample.versions)]:
                wrong.append(f"prompt {sample.prompt.id}: tokens")
            if {3, 4} != set(sample.versions):
                wrong.append(f"prompt {sample.prompt.id}: versions {sample.versions}")
        whole = {s.prompt.id: s.response_ids for s in engine.generate(requests)}
        engine.submit(requests)
        for _ in range(5):
            engine.step()
        ended = engine.abort({(i, 0) for i in (0, 2, 4, 5)})  # all of one replica's, one of the other's
        while engine.step():
            pass
        samples = [*ended, *engine.take()]
        wrong += [
            f"prompt {s.prompt.id}: cut" for s in samples if whole[s.prompt.id][: len(s.response_ids)] != s.response_ids
        ]
        if {s.prompt.id: s.finish for s in samples} != {
            i: Finish.ABORT if i in (0, 2, 4, 5) else Finish.LENGTH for i in whole
        }:
            wrong.append("finishes")
        engine.submit(requests)
        engine.step()
        engine.abort()
        if {s.prompt.id: s.response_ids for s in engine.generate(requests)} != whole:
            wrong.append("after an abort of all")
    return wrong


@pytest.mark.parametrize("variant", ["deepseek_moe", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_pauses_sleep_new_weights_and_aborts_keep_the_ranks_in_step(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    assert pool.run(_life, world=2, variant=variant) == [[], []]


def _routed() -> list[float]:
    model = support.reference("qwen3_moe")
    agreement = []
    with support.opened("qwen3_moe", tp=2, dp=2, ep=2, routed_experts=True) as engine:
        for sample in engine.generate(support.requests(5, temperature=1.0)[engine.replica :: 2]):
            ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
            with torch.no_grad():
                routers = model(ids[:, :-1], output_router_logits=True).router_logits
            expected = torch.stack(
                [r.topk(model.config.num_experts_per_tok).indices.sort(-1).values for r in routers], 1
            )
            found = torch.from_numpy(sample.routed_experts).long().sort(-1).values
            agreement.append(float((found == expected).float().mean()))
    return agreement


def test_each_replica_tells_the_experts_of_its_own_tokens(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    assert pool.run(_routed, world=2) == [[1.0] * 3, [1.0] * 2]
