"""What a request has produced, its limits and its end. No SGLang is needed."""

import pytest

from hybridrl.rollout.samples import Finish, Prompt, Request, SamplingParams
from hybridrl.rollout.seeds import UniformStream
from hybridrl.rollout.sglang.trace import Trace, budget, problems


def _request(prompt: tuple[int, ...] = (5, 6), **params: object) -> Request:
    return Request(
        prompt=Prompt(id=7, token_ids=prompt),
        index=1,
        seed=11,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def test_a_stop_token_ends_a_request_and_stays() -> None:
    trace = Trace(_request(stop_token_ids=(1, 106)), max_new_tokens=9)
    for token in (5, 6, 106):
        assert trace.finish is None
        trace.append(token, -0.5, 3)
    sample = trace.sample()
    assert (sample.response_ids, sample.finish, sample.versions) == ([5, 6, 106], Finish.STOP, [3, 3, 3])


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    trace = Trace(_request(stop_token_ids=(1,)), max_new_tokens=2)
    trace.append(4, -0.5, 0)
    trace.append(1, -0.5, 0)
    assert trace.finish is Finish.STOP


def test_the_limit_ends_a_request_with_nothing_appended() -> None:
    trace = Trace(_request(), max_new_tokens=2)
    trace.append(4, -0.5, 0)
    trace.append(4, -0.5, 1)
    assert (trace.finish, trace.tokens, trace.versions) == (Finish.LENGTH, [4, 4], [0, 1])


def test_each_token_has_its_own_uniform_number() -> None:
    trace, stream = Trace(_request(), max_new_tokens=5), UniformStream(11)
    for index in range(4):
        assert trace.uniform == stream[index]
        trace.append(3, -1.0, 0)


def test_a_request_that_goes_on_has_no_sample() -> None:
    with pytest.raises(ValueError, match="prompt 7, sample 1 has not ended"):
        Trace(_request(), max_new_tokens=5).sample()


@pytest.mark.parametrize(
    ("wanted", "positions", "left"), [(10, 100, 10), (10, 8, 6), (10, 2, 0), (10, 1, 0), (0, 9, 0)]
)
def test_the_budget_is_what_the_context_leaves(wanted: int, positions: int, left: int) -> None:
    assert budget(_request(max_new_tokens=wanted), positions) == left


def test_a_request_must_fit_the_kv_cache_to_its_last_token() -> None:
    requests = [_request((5,) * 6, max_new_tokens=4)]
    assert problems(requests, kv_tokens=10, max_positions=100) == []
    (problem,) = problems(requests, kv_tokens=9, max_positions=100)
    assert "6 prompt tokens and 4 response tokens do not fit the KV cache of 9 tokens" in problem
