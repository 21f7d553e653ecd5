"""Requests over replicas that keep prefixes: where they go, what comes back, and what is counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hybridrl.rollout.metrics import prefix_metrics
from hybridrl.rollout.replicas import Replicas
from hybridrl.rollout.samples import Finish, Prompt, Request, Sample, SamplingParams
from tests.rollout.common import loaded_engine, prompt, requests


class KeepingEngine:
    """Answers every request alike, and keeps all prefixes of its version, by whole tokens."""

    def __init__(self, replica: int, num_replicas: int) -> None:
        self.replica, self.num_replicas = replica, num_replicas
        self.version, self.cache_bytes = 0, 1
        self.prompt_tokens = self.cached_tokens = 0
        self.seen: list[tuple[int, ...]] = []
        self.answered: list[int] = []

    def generate(self, asked: Sequence[Request]) -> list[Sample]:
        samples = []
        for request in asked:
            ids = request.prompt.token_ids
            self.prompt_tokens += len(ids)
            self.cached_tokens += max((common(ids, seen) for seen in self.seen), default=0)
            self.answered.append(request.prompt.id)
            response = [3 + request.seed % 97, *[5] * 30, 1]
            self.seen.append((*ids, *response))
            samples.append(
                Sample(
                    prompt=request.prompt,
                    index=request.index,
                    response_ids=response,
                    log_probs=[-0.5] * 32,
                    versions=[self.version] * 32,
                    finish=Finish.STOP,
                )
            )
        return samples


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def conversation(id_: int, tokens: Sequence[int], n: int = 2) -> list[Request]:
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(1,))
    told = Prompt(id=id_, token_ids=tuple(tokens))
    return [Request(prompt=told, index=i, seed=1000 * id_ + i, params=params) for i in range(n)]


def plain_split(requests: Sequence[Request], num_replicas: int) -> list[list[int]]:
    """Whole groups, the costliest first, each to the replica with the least cost so far."""
    groups: dict[int, list[int]] = {}
    costs: Counter[int] = Counter()
    for i, request in enumerate(requests):
        groups.setdefault(request.prompt.id, []).append(i)
        costs[request.prompt.id] += len(request.prompt.token_ids) + max(request.params.max_new_tokens, 0)
    load = [0] * num_replicas
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    for prompt_id in sorted(groups, key=lambda i: -costs[i]):
        least = load.index(min(load))
        shares[least] += groups[prompt_id]
        load[least] += costs[prompt_id]
    return [sorted(share) for share in shares]


def world(count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[KeepingEngine], list[Replicas]]:
    """A rank for each replica; what they share goes through one list."""
    from hybridrl.rollout import collect

    engines = [KeepingEngine(i, count) for i in range(count)]
    sent: dict[int, bytes] = {}
    monkeypatch.setattr(collect, "_gather", lambda replica, data, group: sent.__setitem__(replica, data) or dict(sent))
    return engines, [Replicas(engine, **options) for engine in engines]  # type: ignore[arg-type]


def turn(ranks: list[Replicas], asked: list[Request]) -> list[Sample]:
    local = [rank.generate(asked) for rank in ranks]
    for _ in range(2):  # the first time, the last ranks' bytes have not come yet
        results = []
        for rank, samples in zip(ranks, local, strict=True):
            try:
                results.append(rank.share(samples, asked))
            except ValueError:
                continue
    assert all(result == results[0] for result in results)
    return results[0]


def test_turns_of_a_conversation_go_where_its_prefix_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, ranks = world(3, monkeypatch, max_imbalance=0.5)
    first = [r for i in range(6) for r in conversation(i, range(100 * i, 100 * i + 40))]
    samples = turn(ranks, first)
    assert [(s.prompt.id, s.index) for s in samples] == [(r.prompt.id, r.index) for r in first]
    homes = [set(engine.answered) for engine in engines]
    assert [len(home) for home in homes] == [2, 2, 2]
    counts = [rank.take_counts() for rank in ranks]
    assert sum(c["tokens/prompt"] for c in counts) == 12 * 40
    assert sum(c["tokens/prompt_cached"] for c in counts) == 6 * 40  # the second of two samples finds it
    by_id = {s.prompt.id: s for s in samples if s.index == 0}
    told = {i: (*by_id[i].prompt.token_ids, *by_id[i].response_ids, 7, 8) for i in by_id}
    second = [request for i in (4, 1, 5, 0, 3, 2) for request in conversation(i, told[i])]
    for engine in engines:
        engine.answered.clear()
    turn(ranks, second)
    assert [set(engine.answered) for engine in engines] == homes
    counts = [rank.take_counts() for rank in ranks]
    totals = {name: sum(c[name] for c in counts) for name in counts[0]}
    # the first of two samples finds the turn before, the second one the whole prompt
    assert totals == {"tokens/prompt": 12 * 74.0, "tokens/prompt_cached": 6 * (72.0 + 74.0)}
    assert prefix_metrics(totals)["rollout/prefix_hit_rate"] > 0.95


def test_new_weights_forget_all_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, ranks = world(2, monkeypatch, max_imbalance=10.0)
    asked = conversation(0, range(64))
    turn(ranks, asked)
    turn(ranks, asked)
    assert [len(engine.answered) for engine in engines] == [4, 0]
    heavy = [*conversation(1, range(500, 700)), *asked]  # the heavy one goes first, to replica 0
    turn(ranks, heavy)
    assert engines[1].answered == []
    for engine in engines:
        engine.version, engine.seen = 1, []
        engine.answered.clear()
    turn(ranks, heavy)
    assert [sorted(set(engine.answered)) for engine in engines] == [[1], [0]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_drawn_does_not_depend_on_replicas(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, ranks = world(count, monkeypatch)
    asked = [r for i in range(5) for r in conversation(i, range(i, i + 20 + i))]
    assert [s.response_ids[0] for s in turn(ranks, asked)] == [3 + r.seed % 97 for r in asked]
    fresh = [engine.answered for engine in engines]
    homes = [[asked[i].prompt.id for i in share] for share in plain_split(asked, count)]
    assert [sorted(ids) for ids in fresh] == [sorted(ids) for ids in homes], "without prefixes it is the plain split"


def test_the_embedded_engine_counts_the_prefill_that_samples_share() -> None:
    engine = loaded_engine(max_batch_size=8)
    ranks = Replicas(engine)
    asked = requests([prompt(1, 10), prompt(2, 6)], n=4)
    ranks.share(ranks.generate(asked), asked)
    assert ranks.take_counts() == {"tokens/prompt": 64.0, "tokens/prompt_cached": 48.0}
    assert ranks.take_counts() == {"tokens/prompt": 0.0, "tokens/prompt_cached": 0.0}
    assert prefix_metrics({"tokens/prompt": 0.0, "tokens/prompt_cached": 0.0}) == {"rollout/prefix_hit_rate": 0.0}
