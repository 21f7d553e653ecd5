"""Log-probs and entropy on one rank against log_softmax; `tests/distributed/test_vocab_parallel.py` shards them."""

import pytest
import torch

from hybridrl.training.logprobs import Vocabulary, token_log_probs


def twin(logits, targets, size, temperature):
    """The obvious form, in float64."""
    log_p = (logits[:, :size].double() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262)])
def test_temperature_sheet(temperature, expected):
    logits = torch.tensor([[2.0, 0.0]])
    log_probs, _ = token_log_probs(logits, torch.tensor([0]), Vocabulary(size=2), temperature=temperature)
    assert log_probs.item() == pytest.approx(expected, abs=1e-6)


def test_value_gradient_and_entropy_sheet():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([0]), Vocabulary(size=4))
    log_probs.sum().backward()
    assert log_probs.item() == pytest.approx(-3.440190, abs=1e-6)
    assert entropy.item() == pytest.approx(0.947537, abs=1e-6)
    assert logits.grad[0].tolist() == pytest.approx([0.967941, -0.087144, -0.236883, -0.643914], abs=1e-6)


def test_padded_vocabulary_has_no_probability_and_no_gradient():
    logits = torch.zeros(1, 8, requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([3]), Vocabulary(size=5))
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == pytest.approx(-1.609438, abs=1e-6)
    assert entropy.item() == pytest.approx(1.609438, abs=1e-6)
    assert logits.grad[0, 5:].tolist() == [0.0] * 3


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
def test_value_and_gradient_equal_log_softmax(chunk, temperature, used):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(11, 20, generator=generator)
    targets = torch.randint(0, 17, (11,), generator=generator)
    weight = torch.randn(2, 11, generator=generator)
    results = []
    for function in (
        lambda x: token_log_probs(x, targets, Vocabulary(size=17), temperature=temperature, chunk=chunk),
        lambda x: twin(x, targets, 17, temperature),
    ):
        x = logits.clone().requires_grad_()
        values = function(x)
        terms = [w * v for w, v, n in zip(weight, values, ("log_probs", "entropy"), strict=True) if used in (n, "both")]
        torch.stack(terms).sum().backward()
        results.append([v.detach().float() for v in values] + [x.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bfloat16_logits_are_computed_in_float32():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(6)
    log_probs, entropy = token_log_probs(logits, targets, Vocabulary(size=50))
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), twin(logits, targets, 50, 1.0)[0], rtol=1e-6, atol=1e-6)
    log_probs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 0.0, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), Vocabulary(size=3))
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [-2e4, 0.0]
    assert torch.isfinite(logits.grad).all()


def test_no_tokens():
    log_probs, entropy = token_log_probs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), Vocabulary(size=4))
    assert log_probs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_of_zero_is_refused(temperature):
    targets = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"rollout.temperature"):
        token_log_probs(torch.zeros(1, 2), targets, Vocabulary(size=2), temperature=temperature)
