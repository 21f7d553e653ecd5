"""Policy losses beyond PPO's: values and gradients in closed form, and finite differences in float64."""

import math

import pytest
import torch

from hybridrl.algorithms.policy_losses import POLICY_LOSSES, cispo, clip_cov, gspo, kl_cov, policy_gradient, ppo_clip
from hybridrl.algorithms.segments import Segments

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def by_response(log_ratios, advantages, ids=None, mask=None, **clip):
    """GSPO over responses that lie end to end, old log-probs 0: its result, and log-ratios with a gradient."""
    new = f64(*log_ratios).requires_grad_()
    ids = torch.zeros(len(log_ratios), dtype=torch.long) if ids is None else torch.tensor(ids)
    mask = torch.ones(len(log_ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    segments = Segments(ids, int(ids.max()) + 1)
    result = gspo(new, torch.zeros_like(new), f64(*advantages), mask=mask, segments=segments, **(clip or CLIP))
    return result, new


def test_the_ratio_of_a_response_is_on_every_token():
    result, _ = by_response([0.1, 0.3, -0.1], [1, 1, 1])
    assert result.ratio.tolist() == pytest.approx([1.105171] * 3, abs=1e-6)
    assert result.loss.tolist() == pytest.approx([-1.105171] * 3, abs=1e-6)


def test_the_gradient_of_a_response_is_that_of_its_ratio():
    # The mean over its tokens of the loss by token has the gradient of -A·s, s = exp(mean of the log-ratios).
    result, new = by_response([0.1, 0.3, -0.1, 0.05, 0.0], [2, 2, 2, -1, -1], ids=[0, 0, 0, 1, 1])
    (result.loss[:3].mean() + result.loss[3:].mean()).backward()
    again = f64(0.1, 0.3, -0.1, 0.05, 0.0).requires_grad_()
    (-2 * again[:3].mean().exp() + again[3:].mean().exp()).backward()
    assert new.grad.tolist() == pytest.approx(again.grad.tolist())


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [(0.4, 1, -1.28, 0), (0.4, -1, math.exp(0.4), 1), (-0.5, 1, -math.exp(-0.5), -1), (-0.5, -1, 0.8, 0)],
)
def test_a_whole_response_is_clipped(log_ratio, advantage, loss, gradient):
    # Tokens on either side of the bounds share the fate of their mean.
    result, new = by_response([log_ratio + 0.6, log_ratio - 0.6], [advantage] * 2)
    result.loss.mean().backward()
    assert result.loss.tolist() == pytest.approx([loss] * 2)
    assert result.clipped.tolist() == [gradient == 0] * 2
    assert new.grad.sum().item() == pytest.approx(gradient * math.exp(log_ratio))


def test_only_trained_tokens_count_in_the_ratio_of_a_response():
    result, _ = by_response([0.2, 9.0, 0.4], [1, 1, 1], mask=[True, False, True], clip_low=0.5, clip_high=0.9)
    assert result.ratio[0].item() == pytest.approx(math.exp(0.3))
    # Padded rows above each other give what packed rows give.
    new = f64(0.1, 0.3, -0.2, 0.0).view(2, 2)
    segments = Segments(torch.tensor([[0, 0], [1, 2]]), 2)
    mask = torch.tensor([[True, True], [True, False]])
    padded = gspo(new, torch.zeros_like(new), torch.ones_like(new), mask=mask, segments=segments, **CLIP)
    assert padded.ratio[mask].tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.2)])


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.5, 0.8), (0.9, 0.9), (1.25, 1.25), (1.5, 1.28), (10.0, 1.28), (0.01, 0.8)]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_weighs_every_token_and_drops_no_gradient(ratio, weight, advantage):
    old = f64(-1.0)
    new = (old + math.log(ratio)).requires_grad_()
    result = cispo(new, old, f64(advantage), **CLIP)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(-weight * advantage * new.item())
    assert new.grad.item() == pytest.approx(-weight * advantage)  # the weight itself has no gradient
    assert result.clipped.item() == (weight != ratio)


def test_cispo_has_no_lower_bound_where_the_paper_has_none():
    new = f64(-5.0)
    assert cispo(new, f64(-1.0), f64(1.0), clip_low=1.0, clip_high=0.28).loss.item() == pytest.approx(5 * math.exp(-4))


def test_plain_policy_gradient_looks_at_no_ratio():
    new = f64(-2.0, -0.5).requires_grad_()
    result = policy_gradient(new, f64(-1.0, -9.0), f64(3.0, -1.0))
    result.loss.sum().backward()
    assert result.loss.tolist() == [6.0, -0.5]
    assert new.grad.tolist() == [-3.0, 1.0]
    assert not result.clipped.any()


def test_selected_tokens_are_held_out_of_clip_cov():
    new = f64(0.1, 0.1, 0.5).requires_grad_()
    selected = torch.tensor([True, False, False])
    result = clip_cov(new, torch.zeros(3).double(), f64(1, 1, 1), selected=selected, **CLIP)
    plain = ppo_clip(new.detach(), torch.zeros(3).double(), f64(1, 1, 1), **CLIP)
    result.loss.sum().backward()
    assert result.loss.tolist() == [0.0, *plain.loss[1:].tolist()]
    assert new.grad.tolist() == pytest.approx([0.0, -math.exp(0.1), 0.0])
    assert result.clipped.tolist() == [True, False, True]


def test_selected_tokens_are_held_near_the_old_policy_by_kl_cov():
    new = f64(0.2, 0.2, 0.0).requires_grad_()
    selected = torch.tensor([True, False, True])
    result = kl_cov(new, torch.zeros(3).double(), f64(1, 1, 1), selected=selected, covariance_coef=0.5)
    result.loss.sum().backward()
    r = math.exp(0.2)
    assert result.loss.tolist() == pytest.approx([-r + 0.5 * (r - 1 - 0.2), -r, -1.0])
    assert new.grad.tolist() == pytest.approx([-r + 0.5 * (r - 1), -r, -1.0])  # nothing where nothing moved


def call(name, new, old, advantages):
    """Any registered loss, over two responses of which a middle token is not trained."""
    return POLICY_LOSSES.call(
        name,
        log_probs=new,
        old_log_probs=old,
        advantages=advantages,
        mask=torch.tensor([True, True, True, False, True, True]),
        segments=Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2),
        selected=torch.tensor([False, True, False, False, False, True]),
        covariance_coef=0.7,
        dual_clip=None,
        **CLIP,
    )


# The gradient of these is not that of their value, on purpose: they hold a ratio constant.
STOPPED = {"cispo", "gspo"}


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - STOPPED))
def test_gradients_are_finite_differences(name):
    generator = torch.Generator().manual_seed(4)
    new = (torch.randn(6, generator=generator, dtype=torch.float64) * 0.1 - 1).requires_grad_()
    old = torch.randn(6, generator=generator, dtype=torch.float64) * 0.1 - 1
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: call(name, x, old, advantages).loss, new)


def test_the_gradient_of_a_response_is_a_finite_difference():
    old = f64(-1.0, -0.8, -1.2, -0.5)
    advantages = f64(1, 1, -1, -1)

    def objective(new):
        """What GSPO maximises, written out: eq. 5 of the paper."""
        total = new.new_zeros(())
        for part, a in ((slice(0, 2), 1.0), (slice(2, 4), -1.0)):
            s = (new[part] - old[part]).mean().exp()
            total = total - torch.minimum(s * a, s.clamp(0.8, 1.28) * a) / 2
        return total

    new = (old + f64(0.05, 0.1, 0.02, -0.04)).requires_grad_()
    segments, mask = Segments(torch.tensor([0, 0, 1, 1]), 2), torch.ones(4, dtype=torch.bool)
    found = gspo(new, old, advantages, mask=mask, segments=segments, **CLIP)
    (found.loss / 4).sum().backward()
    numeric = []
    for i in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[i] = 1e-6
        numeric.append(float(objective(new.detach() + step) - objective(new.detach() - step)) / 2e-6)
    assert new.grad.tolist() == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
def test_wild_ratios_stay_finite_with_their_gradient(name, log_ratio):
    new = torch.full((6,), log_ratio, requires_grad=True)
    result = call(name, new, torch.zeros(6), torch.tensor([1.0, -1, 0, 1, -1, 0]))
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    new = f64(-1.0, -0.8, -1.2, 0, -0.5, -0.7).requires_grad_()
    advantages = f64(1, 1, 1, -2, -2, -2)
    result = call(name, new, new.detach().clone(), advantages)
    result.loss.sum().backward()
    expected = [-1.0, -1, -1, 2, 2, 2]
    if name == "clip_cov":
        expected[1] = expected[5] = 0.0
    assert new.grad.tolist() == pytest.approx(expected)
    assert result.ratio.tolist() == pytest.approx([1.0] * 6)
