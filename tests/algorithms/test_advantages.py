"""GRPO advantages and whitening: closed-form values and the inputs that break naive code."""

import math

import pytest
import torch

from hybridrl.algorithms.advantages import ADVANTAGES, grpo
from hybridrl.algorithms.whiten import whiten


def advantages(rewards, ids=None, normalize="sample_std", valid=None):
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    ids = torch.zeros(len(rewards), dtype=torch.long) if ids is None else torch.tensor(ids)
    return grpo(rewards, ids, None if valid is None else torch.tensor(valid), normalize=normalize).tolist()


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("none", [0.75, -0.25, -0.25, -0.25]),
        ("sample_std", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("population_std", [1.732047, -0.577349, -0.577349, -0.577349]),
    ],
)
def test_one_right_answer_of_four(normalize, expected):
    assert advantages([1, 0, 0, 0], normalize=normalize) == pytest.approx(expected, abs=1e-6)


def test_two_right_answers_of_four():
    assert advantages([1, 1, 0, 0]) == pytest.approx([0.866024, 0.866024, -0.866024, -0.866024], abs=1e-6)
    got = advantages([1, 1, 0, 0], normalize="population_std")
    assert got == pytest.approx([0.999998, 0.999998, -0.999998, -0.999998], abs=1e-6)


@pytest.mark.parametrize("normalize", ["none", "sample_std", "population_std"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [0.7] * 8, [0.1] * 3, [5.0], [-3.3] * 7, [1e30] * 5, []])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(rewards, normalize):
    assert advantages(rewards, normalize=normalize) == [0.0] * len(rewards)


def test_rounding_noise_is_no_signal():
    noisy = [0.1 + 0.2, 0.3, 0.7 - 0.4]
    assert grpo(torch.tensor(noisy, dtype=torch.float64), torch.zeros(3, dtype=torch.long)).tolist() == [0.0] * 3


def test_small_but_real_differences_stay():
    assert advantages([1e-4, 0.0], normalize="none") == pytest.approx([5e-5, -5e-5])


def test_groups_are_told_by_id_and_not_by_position():
    assert advantages([1, 0, 1, 0], [0, 1, 0, 1]) == [0.0] * 4
    rewards, ids = [1, 2, 3, 4, 10, 12, 5, 6, 7], [0, 0, 0, 0, 1, 1, 2, 2, 2]
    expected = [-1.161894, -0.387298, 0.387298, 1.161894, -0.707106, 0.707106, -0.999999, 0, 0.999999]
    assert advantages(rewards, ids) == pytest.approx(expected, abs=1e-6)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = advantages([rewards[i] for i in order], [ids[i] * 1000 - 7 for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-6)


def test_failed_samples_are_outside_the_statistics():
    got = advantages([1, 0, math.nan, 0, 0], valid=[True, True, False, True, True])
    assert got == pytest.approx([1.499997, -0.499999, 0, -0.499999, -0.499999], abs=1e-6)
    assert advantages([1, math.nan], valid=[True, False]) == [0.0, 0.0]
    assert advantages([math.nan, math.inf], valid=[False, False]) == [0.0, 0.0]


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"rewards at \[1\] are not finite"):
        advantages([1, math.nan])
    with pytest.raises(ValueError, match="normalize='std'"):
        advantages([1, 0], normalize="std")
    with pytest.raises(ValueError, match="one length"):
        grpo(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"no advantage estimator is named 'gpro'; there are gpg, grpo"):
        ADVANTAGES["gpro"]


@pytest.mark.parametrize(("sample", "expected"), [(True, [-1, 0, 1, 0]), (False, [-1.224745, 0, 1.224745, 0])])
@pytest.mark.parametrize("masked", [100.0, math.nan, math.inf])
def test_whitening_sees_valid_entries_only(sample, expected, masked):
    got = whiten(torch.tensor([1, 2, 3, masked]), torch.tensor([True, True, True, False]), sample=sample)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mask", [[False, False], [True, False], [True, True]])
@pytest.mark.parametrize("sample", [True, False])
def test_whitening_of_few_or_equal_entries_is_zero(mask, sample):
    assert whiten(torch.tensor([5.0, 5.0]), torch.tensor(mask), sample=sample).tolist() == [0.0, 0.0]
