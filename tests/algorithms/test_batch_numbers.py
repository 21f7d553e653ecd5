"""Numbers of a whole batch: covariances, importance weights, lengths, the KL controller, segments."""

import math

import pytest
import torch

from hybridrl.algorithms.corrections import effective_sample_size, importance_weights
from hybridrl.algorithms.covariance import covariances, select_highest, select_in_range
from hybridrl.algorithms.kl_control import KlController
from hybridrl.algorithms.overlong import soft_punishment
from hybridrl.algorithms.segments import Segments


@pytest.mark.parametrize(
    ("length", "reward"),
    [
        (0, 0),
        (16384, 0),
        (16385, -0.000244140625),
        (18432, -0.5),
        (20479, -0.999755859375),
        (20480, -1),
        (30000, -1),
    ],
)
def test_soft_punishment_by_the_paper(length, reward):
    assert soft_punishment(torch.tensor([length]), max_length=20480, cache=4096).tolist() == [reward]


def test_soft_punishment_starts_before_the_limit_and_scales():
    lengths = torch.tensor([16, 17, 18, 20, 25])
    assert soft_punishment(lengths, max_length=20, cache=4).tolist() == [0, -0.25, -0.5, -1, -1]
    assert soft_punishment(lengths, max_length=20, cache=4, factor=2).tolist() == [0, -0.5, -1, -2, -2]
    assert soft_punishment(lengths, max_length=20, cache=20).tolist() == [-0.8, -0.85, -0.9, -1, -1]


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_outside_the_length_is_refused(cache):
    with pytest.raises(ValueError, match=rf"overlong.cache={cache} .*20"):
        soft_punishment(torch.tensor([1]), max_length=20, cache=cache)


LOG_RATIOS = torch.tensor([0.1, 0.3, -0.1, 2.0, -2.0], dtype=torch.float64)
TWO = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)


def test_weights_by_token_sequence_and_geometric_mean():
    token = [math.exp(x) for x in LOG_RATIOS.tolist()]
    assert importance_weights(LOG_RATIOS, TWO, "token").tolist() == pytest.approx(token)
    assert importance_weights(LOG_RATIOS, TWO, "sequence").tolist() == pytest.approx([math.exp(0.3)] * 3 + [1.0] * 2)
    geometric = importance_weights(LOG_RATIOS, TWO, "geometric").tolist()
    assert geometric == pytest.approx([1.105171] * 3 + [1.0] * 2, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_wild_and_missing_ratios_have_finite_weights(level):
    wild = torch.tensor([200.0, 1e4, -1e4])
    weights = importance_weights(wild, Segments(torch.tensor([0, 1, 2]), 4), level)
    assert torch.isfinite(weights).all()
    assert importance_weights(torch.zeros(0), Segments(torch.zeros(0, dtype=torch.long), 3), level).tolist() == []


def test_unknown_levels_are_named():
    with pytest.raises(ValueError, match="'word' is none of token, sequence, geometric"):
        importance_weights(LOG_RATIOS, TWO, "word")


def test_effective_sample_size():
    assert effective_sample_size(torch.ones(7)).item() == 1
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])).item() == 0.25
    assert effective_sample_size(torch.tensor([3.0, 1.0])).item() == pytest.approx(16 / 20)
    assert effective_sample_size(torch.zeros(0)).item() == 1


def test_covariances_are_products_of_centred_values():
    cov = covariances(torch.tensor([-1.0, -2, -3]), torch.tensor([1.0, 0, -1]))
    assert cov.tolist() == [1, 0, 1]
    assert covariances(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_the_highest_covariances_are_selected():
    cov = torch.tensor([0.1, 5, 3, 5, -9])
    assert select_highest(cov, fraction=0.4).tolist() == [False, True, False, True, False]
    assert select_highest(cov, fraction=0.01).tolist() == [False, True, False, False, False]  # one at least
    assert select_highest(torch.zeros(0), fraction=0.5).tolist() == []


def test_a_few_covariances_in_range_are_drawn():
    cov = torch.linspace(0, 10, 101, dtype=torch.float64)
    first = select_in_range(cov, low=1, high=5, fraction=0.1, seed=3)
    assert first.sum() == 10
    assert bool(((cov[first] >= 1) & (cov[first] <= 5)).all())
    assert torch.equal(first, select_in_range(cov, low=1, high=5, fraction=0.1, seed=3))
    assert not torch.equal(first, select_in_range(cov, low=1, high=5, fraction=0.1, seed=4))
    assert select_in_range(cov, low=1, high=5, fraction=1.0, seed=0).sum() == 41  # no more than there are
    assert select_in_range(cov, low=11, high=12, fraction=0.1, seed=0).sum() == 0


def test_the_coefficient_is_steered_to_the_target():
    control = KlController(0.1, target=6.0)
    control.update(6.6)  # a tenth too high
    assert control.coef == pytest.approx(0.1 * 1.01)
    control.update(600)  # at most a fifth
    assert control.coef == pytest.approx(0.1 * 1.01 * 1.02)
    control.update(0)
    assert control.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    again = KlController(9.0, target=6.0)
    again.load_state_dict(control.state_dict())
    again.update(6.6)
    control.update(6.6)
    assert again.coef == control.coef


def test_without_a_target_the_coefficient_stays():
    control = KlController(0.1)
    control.update(1e9)
    control.load_state_dict({"coef": 7.0})
    assert control.coef == 0.1


def test_segments_sum_spread_and_leave_padding_out():
    segments = Segments(torch.tensor([[0, 0, 2], [1, 3, 3]]), 3)
    values = torch.tensor([[1.0, 2, 4], [8, 100, 100]], requires_grad=True)
    total = segments.total(values)
    assert total.tolist() == [3, 8, 4]
    assert segments.spread(total).tolist() == [[3, 3, 4], [8, 0, 0]]
    (total * torch.tensor([1.0, 10, 100])).sum().backward()
    assert values.grad.tolist() == [[1, 1, 100], [10, 0, 0]]
    mask = torch.tensor([[True, False, False], [True, True, True]])
    assert segments.mean(torch.tensor([[1.0, math.nan, math.nan], [8, 1, 1]]), mask).tolist() == [1, 8, 0]


def test_an_empty_micro_batch_has_no_segments():
    segments = Segments(torch.zeros((1, 2), dtype=torch.long), 0)
    assert segments.total(torch.ones(1, 2)).tolist() == []
    assert segments.spread(segments.mean(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))).tolist() == [[0, 0]]
