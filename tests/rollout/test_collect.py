"""Requests, their spread over replicas, the check of an engine's answer and the exchange's bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybridrl.config.schema import RolloutConfig
from hybridrl.rollout import wire
from hybridrl.rollout.collect import check_samples, make_requests, share
from hybridrl.rollout.replicas import Replicas
from hybridrl.rollout.routing import Router
from hybridrl.rollout.samples import Finish, Prompt, Request, Sample


def prompts(count: int, length: int = 3) -> list[Prompt]:
    return [Prompt(id=100 + i, token_ids=(7,) * (length + i)) for i in range(count)]


def make(count: int, n: int = 2, **changes: Any) -> list[Request]:
    return make_requests(prompts(count), RolloutConfig(n=n, **changes), seed=1, step=0, eos_ids=(2, 1))


def answer(request: Request, tokens: Sequence[int] = (5, 6, 1), **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "response_ids": list(tokens),
        "log_probs": [-0.5] * len(tokens),
        "versions": [3] * len(tokens),
        "finish": Finish.STOP,
    }
    return Sample(prompt=request.prompt, index=request.index, **{**values, **changes})


class EchoEngine:
    """Answers each request by a token of its seed; replica `replica` of `num_replicas`."""

    def __init__(self, replica: int = 0, num_replicas: int = 1) -> None:
        self.replica, self.num_replicas = replica, num_replicas
        self.version, self.cache_bytes = 0, 0
        self.calls: list[int] = []

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        self.calls.append(len(requests))
        return [answer(r, [r.seed % 1000, *[9] * r.index, 1]) for r in requests]


def shared(samples: Sequence[Sample], requests: Sequence[Request]) -> list[Sample]:
    return share(samples, requests, shares=[range(len(requests))])


def test_requests_come_prompt_by_prompt_with_distinct_repeatable_seeds() -> None:
    requests = make(5, n=8)
    assert [(r.prompt.id, r.index) for r in requests] == [(100 + p, i) for p in range(5) for i in range(8)]
    assert len({r.seed for r in requests}) == 40
    assert make(5, n=8) == requests
    later = make_requests(prompts(5), RolloutConfig(n=8), seed=1, step=1, eos_ids=(2, 1))
    other = make_requests(prompts(5), RolloutConfig(n=8), seed=2, step=0, eos_ids=(2, 1))
    assert len({r.seed for r in (*requests, *later, *other)}) == 120


def test_a_seed_does_not_depend_on_which_other_prompts_are_in_the_step() -> None:
    assert make(5)[:4] == make(2)


def test_parameters_come_from_the_configuration() -> None:
    params = make(1, temperature=0.7, top_p=0.9, top_k=4, max_response_length=17, stop_token_ids=[9, 1])[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.7, 0.9, 4, 17)
    assert params.stop_token_ids == (1, 2, 9)


def test_prompts_that_break_the_contract_are_all_reported() -> None:
    bad = [Prompt(id=1, token_ids=(7,) * 4), Prompt(id=1, token_ids=(7,)), Prompt(id=2, token_ids=(7,) * 3)]
    with pytest.raises(ValueError, match=r"id 1 occurs 2 times.*prompt 1 has 4 .*prompt 2 has 3 .*no token ends"):
        make_requests(bad, RolloutConfig(max_prompt_length=2), seed=0, step=0, eos_ids=())


def test_a_greedy_request_is_one_more_a_prompt_and_goes_where_its_prompt_goes() -> None:
    chosen = make_requests(prompts(5), RolloutConfig(n=2), seed=1, step=0, eos_ids=(2,), greedy=True)
    assert [(r.index, r.params.temperature) for r in chosen[:3]] == [(0, 1.0), (1, 1.0), (2, 0.0)]
    assert len(chosen) == 15
    assert [r for r in chosen if r.params.temperature] == make_requests(
        prompts(5), RolloutConfig(n=2), seed=1, step=0, eos_ids=(2,)
    )
    for part in Router(2).assign(chosen):
        assert len(part) == 3 * len({chosen[i].prompt.id for i in part})


def test_a_replica_without_requests_calls_its_engine_too_since_others_may_step_with_it() -> None:
    engine = EchoEngine(replica=2, num_replicas=3)
    assert Replicas(engine).generate(make(2)) == []  # type: ignore[arg-type]
    assert engine.calls == [0]  # requests


def test_one_process_collects_everything_in_order() -> None:
    requests = make(4, n=3)
    replicas = Replicas(EchoEngine())  # type: ignore[arg-type]
    samples = replicas.share(replicas.generate(requests), requests)
    assert [(s.prompt.id, s.index) for s in samples] == [(r.prompt.id, r.index) for r in requests]
    assert [s.response_ids[0] for s in samples] == [r.seed % 1000 for r in requests]
    assert replicas.share(replicas.generate([]), []) == []


def test_everything_on_a_sample_survives_the_exchange() -> None:
    requests = make(2, n=3)
    samples = [
        answer(requests[0], reward=0.1, rewards={"math": 0.1}),
        answer(requests[1], [], finish=Finish.LENGTH, failed=True),
        answer(requests[2], [2**31 - 1, 1], reward=-1e300, rewards={"a": 0.0, "ß": float("inf")}),
        answer(requests[3], mask=[True, False, True], versions=[2**40, 0, 1], finish=Finish.ABORT),
        answer(requests[4], log_probs=[-0.1234567910432815551758, 0.0, -30.0], reward=0.0),
        answer(requests[5]),
    ]
    assert shared(samples, requests) == samples
    assert wire.decode(wire.encode([]), []) == []


def routes(rows: int, layers: int = 3, dtype: type = np.int8) -> Any:
    return np.arange(rows * layers * 2, dtype=dtype).reshape(rows, layers, 2)


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_routed_experts_survive_the_exchange_beside_samples_without(dtype: type) -> None:
    requests = make(2)
    sent = [routes(5, dtype=dtype), None, routes(0, dtype=dtype), -routes(2, dtype=dtype)]
    samples = [answer(r, routed_experts=array, rewards={"a": 1.0}) for r, array in zip(requests, sent, strict=True)]
    received = [s.routed_experts for s in shared(samples, requests)]
    assert received[1] is None
    for array, expected in zip(received, sent, strict=True):
        if array is not None:
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert (array == expected).all()
            array[...] = 0  # it is the receiver's own


def test_routed_experts_that_are_not_of_one_model_are_not_sent() -> None:
    requests = make(1)
    for other in (routes(2, layers=4), routes(2, dtype=np.int16), routes(2, dtype=np.int64)):
        with pytest.raises(ValueError, match="routed experts came as"):
            wire.encode([answer(requests[0], routed_experts=routes(2)), answer(requests[1], routed_experts=other)])


def test_routed_experts_of_other_tokens_are_refused() -> None:
    (request,) = make(1, n=1)
    check_samples([request], [answer(request, routed_experts=routes(5))])
    with pytest.raises(ValueError, match="routed experts of 6 tokens came with 3 of the prompt and 3 of the response"):
        check_samples([request], [answer(request, routed_experts=routes(6))])


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(96 + token) for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "finish", "problem"),
    [
        ((5, 6, 1), Finish.STOP, None),
        ((5, 3, 4), Finish.STOP, None),
        ((5, 6, 7), Finish.STOP, "without a stop token or a stop string"),
        ((), Finish.STOP, "without a stop token or a stop string"),
        ((3, 4, 7), Finish.LENGTH, "went on after stop string 'cd'"),
        ((5, 3, 4), Finish.LENGTH, "finished by length with a stop string"),
        ((5, 1, 7), Finish.LENGTH, "went on after stop token 1"),
        ((5, 6, 7), Finish.LENGTH, None),
    ],
)
def test_an_ending_that_is_not_the_first_stop_is_refused(
    tokens: tuple[int, ...], finish: Finish, problem: str | None
) -> None:
    (request,) = make(1, n=1, stop=["cd", "zz"])
    assert request.params.stop == ("cd", "zz")
    sample = answer(request, tokens, finish=finish)
    if problem is None:
        check_samples([request], [sample], letters)
    else:
        with pytest.raises(ValueError, match=problem):
            check_samples([request], [sample], letters)


def test_broken_bytes_are_refused() -> None:
    requests = make(1)
    data = wire.encode([answer(r) for r in requests])
    with pytest.raises(ValueError, match="bytes"):
        wire.decode(data[:60], requests)
    with pytest.raises(ValueError, match="bytes"):
        wire.decode(data[:-2] + b"    " + data[-2:], requests)


def test_samples_of_other_requests_are_refused_by_name() -> None:
    requests = make(2)
    samples = [answer(r) for r in requests]
    with pytest.raises(ValueError, match=r"3 samples came for 4 requests"):
        shared(samples[:3], requests)
    with pytest.raises(ValueError, match=r"\(100, 1\), \(100, 0\)"):
        shared([samples[1], samples[0], *samples[2:]], requests)
    with pytest.raises(ValueError, match="replicas \\[0\\] shared"):
        share(samples, requests, shares=[[0, 1], [2, 3]])


def test_an_engine_that_answers_something_else_is_refused_with_all_reasons() -> None:
    requests = make(2, max_response_length=3)
    samples = [answer(r) for r in requests]
    check_samples(requests, samples)
    with pytest.raises(ValueError, match="4 requests were answered by 3"):
        check_samples(requests, samples[:3])
    samples[0].log_probs.pop()
    samples[1] = answer(requests[1], [5, 6])
    samples[2] = answer(requests[2], [5] * 4, finish=Finish.LENGTH)
    samples[3] = answer(replace(requests[3], index=7))
    with pytest.raises(ValueError, match=r"2 log_probs.*without a stop.*exceed max_new_tokens=3.*sample 7"):
        check_samples(requests, samples)
    with pytest.raises(ValueError, match=r"lengths \(3, 2, 3, 3\)"):
        wire.encode(samples)
