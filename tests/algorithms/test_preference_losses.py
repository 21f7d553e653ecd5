"""Losses of pairs, labels and teachers, in value and gradient, against closed-form numbers."""

import math

import pytest
import torch

from hybridrl.algorithms.distillation import reverse_kl
from hybridrl.algorithms.preference_losses import PAIR_LOSSES, bradley_terry, kto, kto_divergence

OPTIONS = {"beta": 0.1, "label_smoothing": 0.1, "target_margin": 0.5}


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "options", "h", "loss", "gradient"),
    [
        ("dpo", {"beta": 0.1}, 2.0, 0.598139, -0.0450166),
        ("dpo", {"beta": 0.1}, 0.0, 0.693147, -0.05),
        ("dpo", {"beta": 0.5}, -2.0, 1.313262, -0.365529),
        ("cdpo", {"beta": 0.1, "label_smoothing": 0.1}, 2.0, 0.618139, -0.0350166),
        ("cdpo", {"beta": 1.0, "label_smoothing": 0.1}, math.log(9), 0.325083, 0.0),  # h at which 90% are right
        ("ipo", {"beta": 0.1}, 2.0, 9.0, -6.0),
        ("ipo", {"beta": 0.25}, 2.0, 0.0, 0.0),
        ("simpo", {"beta": 2.0, "target_margin": 0.5}, 0.5, 0.474077, -0.755081),
    ],
)
def test_pair_table(name, options, h, loss, gradient):
    chosen, rejected = double(1.0 + h).requires_grad_(), double(1.0).requires_grad_()
    found = PAIR_LOSSES.call(name, chosen=chosen, rejected=rejected, **{**OPTIONS, **options})
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert chosen.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(-gradient, abs=1e-6)


def test_a_reward_models_margin():
    scores = double(2.0).requires_grad_()
    loss = bradley_terry(scores, double(1.0), double(0.5))
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.474077, abs=1e-6)
    assert scores.grad.item() == pytest.approx(-0.377541, abs=1e-6)
    assert bradley_terry(double(2.0), double(1.0), double(0.0)).item() == pytest.approx(0.313262, abs=1e-6)


@pytest.mark.parametrize(
    ("desirable", "weight", "loss", "gradient"),
    [(True, 1.0, 0.487503, -0.0249844), (False, 1.0, 0.512497, 0.0249844), (True, 2.0, 0.975005, -0.0499688)],
)
def test_kto_table(desirable, weight, loss, gradient):
    ratio, divergence = double(1.0).requires_grad_(), double(0.5).requires_grad_()
    found = kto(
        ratio,
        torch.tensor([desirable]),
        divergence,
        beta=0.1,
        desirable_weight=weight if desirable else 9.0,
        undesirable_weight=9.0 if desirable else weight,
    )
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert ratio.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert divergence.grad is None


def test_the_divergence_of_kto_is_never_negative():
    assert kto_divergence(double(-1.0, 3.0)).item() == 1
    assert kto_divergence(double(-1.0, -1.0)).item() == 0


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_pair_gradients_by_finite_differences(name):
    scores = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: PAIR_LOSSES.call(name, chosen=s[0], rejected=s[1], **OPTIONS), scores)


def test_other_gradients_by_finite_differences():
    scores = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    margins, labels = torch.rand(5, dtype=torch.float64), torch.tensor([True, False, True, True, False])
    assert torch.autograd.gradcheck(lambda s: bradley_terry(s[0], s[1], margins), scores)
    assert torch.autograd.gradcheck(lambda s: kto(s[0], labels, double(0.3), beta=0.7, desirable_weight=1.5), scores)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "simpo"])
@pytest.mark.parametrize("h", [-1e6, 1e6])
def test_far_pairs_stay_finite_with_their_gradient(name, h):
    chosen = torch.tensor([h], requires_grad=True)
    loss = PAIR_LOSSES.call(name, chosen=chosen, rejected=torch.zeros(1), **OPTIONS)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(chosen.grad).all()


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(0.0, [-1.0, 1.0, 0.0, -0.5]), (0.5, [-0.625, 0.75, 0.0, -0.5]), (1.0, [-0.5, 0.5, 0.0, -0.5])],
)
@pytest.mark.parametrize("masked", [0.0, math.nan, math.inf])
def test_a_teachers_advantages(discount, expected, masked):
    policy, teacher = torch.tensor([[-1.0, -2.0, masked, -1.0]]), torch.tensor([[-2.0, -1.0, masked, -1.5]])
    mask = torch.tensor([[True, True, False, True]])
    assert reverse_kl(policy, teacher, mask, discount=discount).tolist() == [pytest.approx(expected)]


def test_a_teachers_advantages_are_the_gradient_of_the_reverse_divergence():
    """Over all tokens a policy may choose: Σ p·A·∇log p = -∇KL(policy ‖ teacher)."""
    logits, teacher = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    logits.requires_grad_()
    log_p, log_t = logits.log_softmax(-1), teacher.log_softmax(-1)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), logits, retain_graph=True)
    columns = torch.ones(6, 1, dtype=torch.bool)
    advantages = reverse_kl(log_p.detach()[:, None], log_t[:, None], columns)[:, 0].double()
    (found,) = torch.autograd.grad((log_p.detach().exp() * advantages * log_p).sum(), logits)
    torch.testing.assert_close(found, -expected, rtol=1e-6, atol=1e-7)
