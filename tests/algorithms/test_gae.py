"""Generalized advantage estimation against its definition, and the critic's loss against closed-form numbers."""

import math

import pytest
import torch

from hybridrl.algorithms.gae import gae
from hybridrl.algorithms.value_losses import explained_variance, squared_error


def by_definition(rewards, values, mask, gamma, lam):
    """A_t = Σ over later own tokens of (γλ)^l·δ, token by token; rewards of others go to the own token before."""
    own = [t for t in range(len(mask)) if mask[t]]
    advantages = [0.0] * len(mask)
    for i, start in enumerate(own):
        for l, t in enumerate(own[i:]):  # noqa: E741 - the paper's letter
            after = own[own.index(t) + 1 :]
            reward = sum(rewards[t : after[0] if after else len(mask)])
            delta = reward + (gamma * values[after[0]] if after else 0.0) - values[t]
            advantages[start] += (gamma * lam) ** l * delta
    return advantages


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_are_those_of_the_definition(gamma, lam):
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    mask[0], mask[1], mask[2, 3:] = True, False, False
    rewards[~mask.cumsum(-1).bool()] = 0.0
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(6):
        expected = by_definition(rewards[i].tolist(), values[i].tolist(), mask[i].tolist(), gamma, lam)
        assert advantages[i].tolist() == pytest.approx(expected, abs=1e-6)
        assert returns[i].tolist() == pytest.approx(
            [a + v if m else 0.0 for a, v, m in zip(expected, values[i].tolist(), mask[i].tolist(), strict=True)],
            abs=1e-6,
        )


def test_discounts_step_over_a_tools_tokens():
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])
    advantages, returns = gae(rewards, torch.zeros(1, 3), mask, gamma=0.5, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[0.5, 0.0, 1.0]]


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_a_reward_on_a_tools_last_token_is_not_lost(gamma):
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, True, False]])
    _, returns = gae(rewards, torch.zeros(1, 3), mask, gamma=gamma, lam=1.0)
    assert returns.tolist() == [[gamma, 1.0, 0.0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_values_outside_the_mask_do_not_count(poison):
    mask = torch.tensor([[False, True, False, True], [False] * 4])
    rewards, values = torch.tensor([[0, 1.0, 0, 2.0], [0] * 4]), torch.tensor([[0, 0.5, 0, 0.25], [0] * 4])
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dirty = gae(rewards.where(mask, poison), values.where(mask, poison), mask, gamma=0.9, lam=0.8)
    for ours, theirs in zip(dirty, clean, strict=True):
        assert torch.equal(ours, theirs)
    assert not clean[0][1].any()


def test_a_perfect_critic_leaves_no_advantage():
    rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[False, True, True, True]])
    values = torch.tensor([[0.0, 0.81, 0.9, 1.0]])
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.95)
    assert advantages.abs().max() < 1e-7


@pytest.mark.parametrize(
    ("value", "clip", "loss", "gradient"),
    [
        (1.5, None, 0.125, -0.5),
        (1.5, 0.2, 0.32, 0.0),  # moved towards the return by more than the clip
        (1.1, 0.2, 0.405, -0.9),
        (0.5, 0.2, 1.125, -1.5),  # moved away from it
        (2.5, 0.2, 0.32, 0.0),
        (3.5, 0.2, 1.125, 1.5),  # and beyond it, further than it was
    ],
)
def test_value_loss_table(value, clip, loss, gradient):
    v = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    found = squared_error(v, torch.tensor(1.0), torch.tensor(2.0), clip=clip)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss)
    assert v.grad.item() == pytest.approx(gradient)
    assert bool(found.clipped) == (gradient == 0)


def test_value_loss_by_finite_differences():
    v, old, returns = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: squared_error(x, old, returns, clip=0.3).loss, v)


def test_explained_variance():
    returns = torch.tensor([2.0, 4.0, 6.0])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0]), returns).item() == pytest.approx(0.75)
    assert explained_variance(returns + 5, returns).item() == 1
    assert explained_variance(torch.zeros(3), returns).item() == 0
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert math.isnan(explained_variance(torch.zeros(2), torch.ones(2)).item())
