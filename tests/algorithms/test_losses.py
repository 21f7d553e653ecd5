"""Policy loss and KL by token, in value and gradient, against closed-form numbers."""

import math

import pytest
import torch

from hybridrl.algorithms.kl import KL_ESTIMATORS, token_rewards
from hybridrl.algorithms.policy_losses import POLICY_LOSSES, ppo_clip
from hybridrl.algorithms.supervised import sft

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss_and_gradient(ratio, advantage, dual_clip=3.0, **clip):
    log_ratio = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor(float(advantage), dtype=torch.float64)
    result = ppo_clip(log_ratio, torch.zeros_like(log_ratio), advantage, dual_clip=dual_clip, **(clip or CLIP))
    result.loss.backward()
    assert log_ratio.grad is not None
    assert bool(result.clipped) == (log_ratio.grad.item() == 0)
    assert result.ratio.item() == pytest.approx(ratio)
    return result.loss.item(), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("ratio", "positive", "negative", "undual"),
    [
        (0.5, (-0.5, -0.5), (0.8, 0), (0.8, 0)),
        (0.9, (-0.9, -0.9), (0.9, 0.9), (0.9, 0.9)),
        (1.25, (-1.25, -1.25), (1.25, 1.25), (1.25, 1.25)),
        (1.5, (-1.28, 0), (1.5, 1.5), (1.5, 1.5)),
        (10, (-1.28, 0), (3, 0), (10, 10)),
    ],
)
def test_clip_table(ratio, positive, negative, undual):
    assert loss_and_gradient(ratio, 1) == pytest.approx(positive)
    assert loss_and_gradient(ratio, 1, dual_clip=None) == pytest.approx(positive)
    assert loss_and_gradient(ratio, -1) == pytest.approx(negative)
    assert loss_and_gradient(ratio, -1, dual_clip=None) == pytest.approx(undual)


def test_symmetric_clip_is_lower_than_clip_higher():
    assert loss_and_gradient(1.25, 1, clip_low=0.2, clip_high=0.2) == pytest.approx((-1.2, 0))


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_wild_ratios_stay_finite_with_their_gradient(log_ratio, advantage, dual_clip):
    new = torch.tensor([log_ratio], requires_grad=True)
    result = ppo_clip(new, torch.zeros(1), torch.tensor([advantage]), dual_clip=dual_clip, **CLIP)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -1.0])
def test_dual_clip_of_one_or_less_is_refused(dual_clip):
    with pytest.raises(ValueError, match="dual_clip"):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.ones(1), dual_clip=dual_clip, **CLIP)


def test_unknown_losses_are_named():
    with pytest.raises(ValueError, match="no policy loss is named 'ppo'"):
        POLICY_LOSSES["ppo"]


@pytest.mark.parametrize(
    ("policy", "reference", "name", "value", "gradient"),
    [
        (-1, -2, "k1", 1, 1),
        (-1, -2, "k2", 0.5, 1),
        (-1, -2, "k3", 0.367879, 0.632121),
        (-2, -1, "k1", -1, 1),
        (-2, -1, "k2", 0.5, -1),
        (-2, -1, "k3", 0.718282, -1.718282),
    ],
)
def test_kl_table(policy, reference, name, value, gradient):
    p = torch.tensor(float(policy), dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS[name](p, torch.tensor(float(reference), dtype=torch.float64))
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert p.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
@pytest.mark.parametrize("difference", [-1e4, -200.0, 200.0, 1e4])
def test_kl_of_far_models_stays_finite_with_its_gradient(name, difference):
    p = torch.tensor([difference], requires_grad=True)
    kl = KL_ESTIMATORS[name](p, torch.zeros(1))
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(p.grad).all()
    assert name != "k3" or p.grad.item() >= 0 or difference < 0


def test_token_rewards_end_on_the_last_trained_token():
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0] * 4])
    mask = torch.tensor([[False, True, True, False], [False] * 4])
    got = token_rewards(torch.tensor([5.0, 7.0]), kl, mask, coef=0.1)
    torch.testing.assert_close(got, torch.tensor([[0, -0.1, 4.8, 0], [0.0] * 4]))


def test_sft_is_negative_log_likelihood():
    assert sft(torch.tensor([-1.0, -0.5])).tolist() == [1.0, 0.5]
