"""Prefixes stay with the replica that holds them, and no replica is overloaded for it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rollout.routing import Router
from hybridrl.rollout.samples import Finish, Prompt, Request, Sample, SamplingParams


def _requests(prompts: dict[int, Sequence[int]], n: int = 1, response: int = 10) -> list[Request]:
    params = SamplingParams(max_new_tokens=response)
    return [
        Request(prompt=Prompt(id=id_, token_ids=tuple(tokens)), index=i, seed=i, params=params)
        for id_, tokens in prompts.items()
        for i in range(n)
    ]


def _turn(id_: int, length: int) -> list[int]:
    return [1000 * id_ + i for i in range(length)]


def _replica_of(shares: list[list[int]], requests: Sequence[Request]) -> dict[int, int]:
    found: dict[int, set[int]] = {}
    for replica, share in enumerate(shares):
        for i in share:
            found.setdefault(requests[i].prompt.id, set()).add(replica)
    assert all(len(replicas) == 1 for replicas in found.values()), "a group is spread over replicas"
    return {id_: replicas.pop() for id_, replicas in found.items()}


def test_a_conversation_stays_where_it_began() -> None:
    router = Router(3, max_imbalance=0.5)
    first = _requests({i: _turn(i, 50) for i in range(6)}, n=2)
    began = _replica_of(router.assign(first), first)
    assert sorted(began.values()) == [0, 0, 1, 1, 2, 2]
    # the second turns come in another order, each longer than the first
    second = _requests({i: [*_turn(i, 50), *range(30)] for i in (5, 0, 3, 1, 4, 2)}, n=2)
    assert _replica_of(router.assign(second), second) == began


def test_a_response_counts_as_held() -> None:
    router = Router(2)
    requests = _requests({0: _turn(0, 8), 1: _turn(1, 8)})
    replica = _replica_of(router.assign(requests), requests)[1]
    response = list(range(500, 532))
    sample = Sample(
        prompt=requests[1].prompt, index=0, response_ids=response, log_probs=[0.0] * 32, versions=[0] * 32,
        finish=Finish.STOP,
    )  # fmt: skip
    router.observe([sample], replica)
    again = _requests({7: [*_turn(1, 8), *response, 1, 2, 3], 8: _turn(8, 48)})
    assert _replica_of(router.assign(again), again)[7] == replica


def test_a_prefix_that_all_prompts_share_does_not_draw_all_to_one_replica() -> None:
    router = Router(4, max_imbalance=0.25)
    system = list(range(64))
    for start in range(0, 64, 16):
        requests = _requests({i: [*system, *_turn(i, 20)] for i in range(start, start + 16)})
        loads = [len(share) for share in router.assign(requests)]
        assert max(loads) <= 1.25 * 16 / 4


def test_long_prompts_are_spread() -> None:
    requests = _requests({i: _turn(i, length) for i, length in enumerate((1000, 1000, 10, 10))}, n=2)
    assert Router(2).assign(requests) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(
    lengths=st.lists(st.integers(1, 200), max_size=30), n=st.integers(1, 4), replicas=st.integers(1, 5),
    slack=st.sampled_from([0.0, 0.25, 1.0]),
)  # fmt: skip
def test_each_request_goes_once_and_loads_are_bounded(lengths: list[int], n: int, replicas: int, slack: float) -> None:
    router = Router(replicas, max_imbalance=slack)
    requests = _requests({i: _turn(i % 3, length) for i, length in enumerate(lengths)}, n=n)
    for _ in range(2):
        shares = router.assign(requests)
        assert sorted(i for share in shares for i in share) == list(range(len(requests)))
        _replica_of(shares, requests)
        costs = [sum(len(requests[i].prompt.token_ids) + 10 for i in share) for share in shares]
        largest = max((n * (length + 10) for length in lengths), default=0)
        assert max(costs) <= (1 + slack) * sum(costs) / replicas + largest


@pytest.mark.parametrize(("replicas", "slack"), [(0, 0.1), (2, -0.1), (2, float("nan"))])
def test_sizes_that_make_no_sense_are_refused(replicas: int, slack: float) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Router(replicas, max_imbalance=slack)
