"""Advantages without a critic: closed-form values, slow twins, and the inputs that break naive code."""

import itertools
import math
import statistics

import pytest
import torch

from hybridrl.algorithms.advantages import ADVANTAGES, gpg, grpo, opo, reinforce, remax, rloo
from hybridrl.algorithms.pass_at_k import pass_at_k

REWARDS, IDS = [1.0, 2, 3, 4, 10, 12, 5, 6, 7], [0, 0, 0, 0, 1, 1, 2, 2, 2]


def tensors(rewards, ids=None):
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids if ids is not None else [0] * len(rewards))


def everything(name, rewards, ids=None, valid=None):
    """The estimator `name` with lengths of 1 to n, baselines of 0.5 and k = 2."""
    values, group_ids = tensors(rewards, ids)
    return ADVANTAGES.call(
        name,
        rewards=values,
        group_ids=group_ids,
        valid=None if valid is None else torch.tensor(valid),
        lengths=torch.arange(1, len(rewards) + 1),
        baselines=torch.full_like(values, 0.5),
        normalize="sample_std",
        pass_k=2,
    )


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    assert rloo(*tensors([1, 0, 0, 0])).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    expected = []
    for i, (reward, group) in enumerate(zip(REWARDS, IDS, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(REWARDS, IDS, strict=True)) if g == group and j != i]
        expected.append(reward - statistics.mean(others))
    assert rloo(*tensors(REWARDS, IDS)).tolist() == pytest.approx(expected)


def test_the_batchs_deviation_scales_all_groups_alike():
    values, ids = tensors(REWARDS, IDS)
    got = grpo(values, ids, normalize="batch_std")
    deviation = statistics.stdev(REWARDS)
    assert got.tolist() == pytest.approx([c / deviation for c in [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]], abs=1e-6)
    # The mean of the batch, too, is of the valid rewards alone.
    failed = grpo(*tensors([*REWARDS, 99.0], [*IDS, 2]), torch.tensor([True] * 9 + [False]), normalize="batch_std")
    assert failed.tolist() == pytest.approx([*got.tolist(), 0])


def test_reinforce_is_the_reward_itself():
    assert reinforce(*tensors([1, -2, 0.5])).tolist() == [1, -2, 0.5]


def test_the_greedy_response_is_the_baseline_of_its_prompt_alone():
    values, ids = tensors([1, 0, 1, 0], [0, 0, 1, 1])
    baselines = torch.tensor([1.0, 1.0, 0.0, math.nan])
    assert remax(values, ids, baselines=baselines).tolist() == [0, -1, 1, 0]


def test_the_optimal_baseline_weighs_rewards_by_length():
    values, ids = tensors([1, 0, 1, 5], [0, 0, 0, 1])
    got = opo(values, ids, lengths=torch.tensor([1, 3, 4, 9]))
    assert got.tolist() == pytest.approx([1 - 5 / 8, -5 / 8, 1 - 5 / 8, 0])
    plain = opo(values, ids, lengths=torch.tensor([2, 2, 2, 2]))
    assert plain.tolist() == pytest.approx(grpo(values, ids, normalize="none").tolist())
    assert opo(values, ids, lengths=torch.zeros(4)).tolist() == [1, 0, 1, 0]


def test_groups_without_signal_are_made_up_for():
    values, ids = tensors([1, 0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3])
    assert gpg(values, ids).tolist() == [1, -1, 0, 0, 0, 0, 1, -1]  # 8 responses, 4 of them with signal: twice ±0.5
    assert gpg(*tensors([1, 1])).tolist() == [0, 0]
    valid = torch.tensor([True] * 6 + [False] * 2)
    assert gpg(values, ids, valid).tolist() == [1.5, -1.5, 0, 0, 0, 0, 0, 0]


def best_of_k_by_enumeration(rewards, k):
    """(E[max of k | i among them] - E[max of k]) / deviation of the max, over all subsets."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean, deviation = statistics.mean(best), statistics.pstdev(best)
    return [
        (statistics.mean([b for b, s in zip(best, subsets, strict=True) if i in s]) - mean) / (deviation + 1e-6)
        for i in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0], [3, -1, 2, 0.5, 2], [1, 1, 1, 0], [0.2, 0.9, 0.1, 0.4]]
)
def test_the_best_of_k_is_as_over_all_subsets(rewards, k):
    got = pass_at_k(*tensors(rewards), pass_k=k)
    # Where the best is the same in every subset, nothing tells responses apart.
    assert got.tolist() == pytest.approx(best_of_k_by_enumeration(rewards, k), abs=1e-5)


def test_the_best_of_k_has_the_papers_closed_form():
    n, wrong, k = 8, 5, 3
    rewards = [0.0] * wrong + [1.0] * (n - wrong)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / deviation
    bad = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
    got = pass_at_k(*tensors(rewards), pass_k=k).tolist()
    assert got == pytest.approx([bad] * wrong + [right] * (n - wrong), abs=1e-5)


def test_the_best_of_one_is_the_group_normalised():
    values, ids = tensors(REWARDS, IDS)
    assert pass_at_k(values, ids, pass_k=1).tolist() == pytest.approx(
        grpo(values, ids, normalize="population_std").tolist(), abs=1e-6
    )


def test_groups_with_fewer_than_k_responses_have_no_best_of_k():
    values, ids = tensors([1, 0, 1, 0, 0], [0, 0, 1, 1, 1])
    assert pass_at_k(values, ids, pass_k=3).tolist() == [0] * 5  # one subset of three: no deviation
    assert pass_at_k(values, ids, pass_k=2).tolist()[:2] == [0, 0]
    with pytest.raises(ValueError, match=r"algorithm.pass_k=0"):
        pass_at_k(values, ids, pass_k=0)


BY_GROUP = ["grpo", "rloo", "opo", "gpg", "pass_at_k"]


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [-3.3] * 7, [1e30] * 5, [5.0], []])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name, rewards):
    assert everything(name, rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", [*BY_GROUP, "reinforce", "remax"])
def test_failed_samples_are_outside_everything(name):
    ids = [3, 9, 3, 9, 3]
    got = everything(name, [1.0, 5.0, math.nan, 2.0, 0.0], ids, [True, True, False, True, True])
    assert got[2] == 0
    assert torch.isfinite(got).all()
    assert everything(name, [math.nan] * 3, valid=[False] * 3).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match=r"rewards at \[1\] are not finite"):
        everything(name, [1.0, math.inf])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "pass_at_k", "reinforce", "remax"])
def test_responses_may_come_in_any_order(name):
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1)).tolist()
    straight = everything(name, REWARDS, IDS)
    shuffled = everything(name, [REWARDS[i] for i in order], [IDS[i] * 100 - 7 for i in order])
    torch.testing.assert_close(shuffled, straight[order])


def test_each_estimator_says_what_it_looks_at():
    assert {name for name in ADVANTAGES if "lengths" in ADVANTAGES.wants(name)} == {"opo"}
    assert {name for name in ADVANTAGES if "baselines" in ADVANTAGES.wants(name)} == {"remax"}
    with pytest.raises(TypeError, match="baselines"):
        ADVANTAGES.call("remax", rewards=torch.zeros(1), group_ids=torch.zeros(1), valid=None)
