"""The pool of groups: what is kept, dropped, made up and carried over, when it ends, and that its state is whole."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from hybridrl.config.schema import DynamicSamplingConfig
from hybridrl.rollout.groups import GroupPool, NoSignalError
from hybridrl.rollout.samples import Finish, Prompt, Request, Sample, SamplingParams

ON = DynamicSamplingConfig(enabled=True, max_generation_batches=3, generation_prompts=4)


def batch(rewards_by_prompt, greedy=None, failed=(), judges=None):
    """Requests and judged samples: {prompt: rewards}; sample i of prompt p has i + 1 tokens p."""
    requests, samples = [], []
    for p, rewards in rewards_by_prompt.items():
        prompt = Prompt(id=p, token_ids=(1, 2), text=f"prompt {p}", answer="a", metadata={"level": [p]})
        drawn = [(r, 1.0) for r in rewards] + ([(greedy[p], 0.0)] if greedy else [])
        for i, (reward, temperature) in enumerate(drawn):
            requests.append(Request(prompt=prompt, index=i, seed=0, params=SamplingParams(temperature=temperature)))
            samples.append(
                Sample(
                    prompt=prompt,
                    index=i,
                    response_ids=[p] * (i + 1),
                    log_probs=[-0.5] * (i + 1),
                    versions=[3] * (i + 1),
                    finish=Finish.STOP,
                    reward=None if (p, i) in failed else reward,
                    failed=(p, i) in failed,
                    rewards={"exact": reward} if judges is None else judges[p][i],
                )
            )
    return requests, samples


def prompts(groups):
    return [group.samples[0].prompt.id for group in groups]


def test_without_dynamic_sampling_every_group_counts():
    pool = GroupPool(DynamicSamplingConfig(), 2)
    assert (pool.batch, pool.one_batch, pool.full) == (2, True, False)
    pool.check()
    pool.add(*batch({7: [1, 1], 9: [0, 1]}))
    groups, metrics = pool.take()
    assert (prompts(groups), metrics) == ([7, 9], {})
    assert not pool.full


def test_groups_whose_rewards_are_alike_are_dropped_and_made_up():
    pool = GroupPool(ON, 3)
    assert (pool.batch, pool.one_batch) == (4, False)
    pool.add(*batch({1: [1, 1], 2: [0, 1], 3: [0, 0], 4: [1, 0]}))
    assert not pool.full
    pool.add(*batch({5: [1, 0], 6: [0, 1], 7: [1, 1], 8: [0, 0]}))
    assert pool.full
    groups, metrics = pool.take()
    assert prompts(groups) == [2, 4, 5]
    assert metrics == {
        "sampling/batches": 2,
        "sampling/groups": 8,
        "sampling/alike": 0.5,
        "sampling/pending": 0,
        "tokens/discarded": 4 * 3 + 3,  # four groups without a signal, and one more than there was room for
    }


def test_every_field_of_a_kept_sample_is_of_the_kept_prompt():
    pool = GroupPool(ON, 3)
    pool.add(*batch({1: [1, 1], 2: [0.25, 1], 3: [0, 0], 4: [1, 0.5]}))
    pool.add(*batch({5: [0.75, 0], 6: [0, 0], 7: [1, 1], 8: [0, 0]}))
    groups, _ = pool.take()
    expected = {2: [0.25, 1], 4: [1, 0.5], 5: [0.75, 0]}
    for group in groups:
        p = group.samples[0].prompt.id
        assert [s.reward for s in group.samples] == [s.rewards["exact"] for s in group.samples] == expected[p]
        assert all(set(s.response_ids) == {p} and s.prompt.text == f"prompt {p}" for s in group.samples)
        assert [len(s.response_ids) for s in group.samples] == [1, 2]


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.1 + 0.2, 0.3], False),
        ([0.0, 1e-7], False),
        ([0.0, 1e-5], True),
        ([1e30, 1e30 * (1 + 1e-9)], False),
        ([-1.0, -1.0], False),
    ],
)
def test_alike_is_within_a_tolerance(rewards, signal):
    pool = GroupPool(replace(ON, tolerance=1e-6), 1)
    pool.add(*batch({1: rewards}))
    assert pool.full == signal
    wide = GroupPool(replace(ON, tolerance=0.5), 1)
    wide.add(*batch({1: [0, 0.5]}))
    assert not wide.full


def test_the_judge_decides_and_not_a_reward_that_length_has_shaped():
    judges = {1: [{"exact": 1.0, "short": 0.1}, {"exact": 1.0, "short": 0.9}]}
    pool = GroupPool(replace(ON, judge="exact"), 1)
    pool.add(*batch({1: [1.1, 1.9]}, judges=judges))
    assert not pool.full
    pool = GroupPool(replace(ON, judge="short"), 1)
    pool.add(*batch({1: [1, 1]}, judges=judges))
    assert pool.full
    with pytest.raises(ValueError, match=r"prompt 1, sample 0 has no score by .*judge=brief; it has exact, short"):
        GroupPool(replace(ON, judge="brief"), 1).add(*batch({1: [1, 1]}, judges=judges))


def test_failed_samples_have_no_say():
    pool = GroupPool(ON, 1)
    pool.add(*batch({1: [1, 1, 0], 2: [1, 0, 0]}, failed={(1, 2), (2, 0), (2, 1), (2, 2)}))
    assert not pool.full
    pool.add(*batch({3: [1, 0, 0]}, failed={(3, 2)}))
    assert pool.full


def test_the_greedy_response_is_told_apart_and_can_be_the_signal():
    pool = GroupPool(ON, 2)
    pool.add(*batch({1: [1, 1], 2: [1, 1], 3: [0, 1]}, greedy={1: 1, 2: 0, 3: 0}))
    groups, _ = pool.take()
    assert prompts(groups) == [2, 3]
    assert [len(g.samples) for g in groups] == [2, 2]
    assert [g.greedy.index for g in groups] == [2, 2]


def test_the_end_comes_after_exactly_the_allowed_batches():
    pool = GroupPool(ON, 2)
    for first in (0, 10, 20):
        pool.check()
        pool.add(*batch({first + 1: [1, 1], first + 2: [0, 0], first + 3: [0, 0], first + 4: [0, 0]}))
    with pytest.raises(NoSignalError, match=r"3 batches of 4 .*=3\) gave 0 of the 2 .*12 of 12 .*75% all 0, 25% all 1"):
        pool.check()
    unlimited = GroupPool(replace(ON, max_generation_batches=0), 1)
    for i in range(20):
        unlimited.check()
        unlimited.add(*batch({i: [1, 1]}))


def test_a_full_step_is_no_end():
    pool = GroupPool(replace(ON, max_generation_batches=1), 1)
    pool.add(*batch({1: [1, 0]}))
    pool.check()
    with pytest.raises(RuntimeError, match="1 of 2 groups"):
        _filled(GroupPool(ON, 2), {1: [0, 1]}).take()


def _filled(pool, rewards):
    pool.add(*batch(rewards))
    return pool


def test_surplus_groups_can_wait_for_the_next_step():
    pool = GroupPool(replace(ON, surplus="keep"), 2)
    pool.add(*batch({1: [1, 0], 2: [0, 1], 3: [1, 0], 4: [0, 0]}))
    groups, metrics = pool.take()
    assert prompts(groups) == [1, 2]
    assert (metrics["sampling/pending"], metrics["tokens/discarded"]) == (1, 3)
    pool.add(*batch({5: [1, 0]}))
    groups, metrics = pool.take()
    assert prompts(groups) == [3, 5]  # the oldest first
    assert metrics["sampling/groups"] == 1


@pytest.mark.parametrize("surplus", ["drop", "keep"])
def test_a_pool_that_is_saved_in_the_middle_of_a_step_goes_on(surplus):
    config = replace(ON, surplus=surplus)
    first = {1: [1, 1], 2: [0, 1], 3: [0, 0], 4: [1, 1]}
    more = {5: [1, 0], 6: [0, 1], 7: [1, 1]}
    straight = _filled(_filled(GroupPool(config, 2), first), more)
    saved = json.loads(json.dumps(_filled(GroupPool(config, 2), first).state_dict()))
    resumed = GroupPool(config, 2)
    resumed.load_state_dict(saved)
    resumed.add(*batch(more))
    for _ in range(2):
        assert resumed.state_dict() == straight.state_dict()
        if straight.full:
            assert resumed.take() == straight.take()
    assert isinstance(resumed.state_dict(), dict)


def test_a_loaded_pool_holds_the_same_samples_and_counts_its_batches():
    pool = _filled(GroupPool(ON, 3), {1: [0, 1], 2: [1, 1]})
    pool.add(*batch({3: [0, 1]}, greedy={3: 0}))
    again = GroupPool(ON, 3)
    again.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    again.add(*batch({4: [1, 1]}))
    with pytest.raises(NoSignalError, match="3 batches"):
        again.check()
    again.add(*batch({5: [1, 0]}))
    groups, _ = again.take()
    assert prompts(groups) == [1, 3, 5]
    assert groups[0].samples == tuple(batch({1: [0, 1]})[1])
    assert groups[1].greedy == batch({3: [0, 1]}, greedy={3: 0})[1][2]


def test_the_experts_of_a_token_are_saved_with_it():
    requests, samples = batch({1: [0, 1]})
    routes = np.arange(12, dtype=np.int8).reshape(3, 2, 2)
    samples[1].routed_experts = routes
    pool, again = GroupPool(ON, 1), GroupPool(ON, 1)
    pool.add(requests, samples)
    again.load_state_dict(pickle.loads(pickle.dumps(pool.state_dict())))
    (group,), _ = again.take()
    assert group.samples[0].routed_experts is None
    assert np.array_equal(group.samples[1].routed_experts, routes)
    assert group.samples[1].routed_experts.dtype == np.int8
