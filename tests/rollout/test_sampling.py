"""The sampling distribution against number sheets, a slow twin in plain Python, and counts of draws."""

import math
import random

import pytest
import torch

from hybridrl.rollout import sampling
from hybridrl.rollout.samples import SamplingParams
from tests.rollout.common import slow_log_probs


def log_probs(logits: list[list[float]], limit: int | None = None, **params: float) -> torch.Tensor:
    rows = [SamplingParams(**params)] * len(logits)  # type: ignore[arg-type]
    return sampling.log_probs(torch.tensor(logits), sampling.Filters.of(rows), limit)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262)])
def test_temperature_divides_logits(temperature: float, expected: float) -> None:
    assert log_probs([[2.0, 0.0]], temperature=temperature)[0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_log_prob_without_filters_is_plain_log_softmax() -> None:
    assert log_probs([[1.0, 2.0, 3.0, 4.0]])[0, 0].item() == pytest.approx(-3.440190, abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass_and_renormalises() -> None:
    logits = [[math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]]
    assert log_probs(logits, top_p=0.8)[0].tolist() == pytest.approx([-0.470004, -0.980829, -math.inf, -math.inf], 1e-5)
    assert log_probs(logits, top_p=0.81)[0].isfinite().tolist() == [True, True, True, False]
    assert log_probs(logits, top_p=1e-9)[0].tolist() == [0.0] + [-math.inf] * 3


def test_top_k_takes_softmax_over_what_it_keeps() -> None:
    kept = log_probs([[2.0, 1.0, 0.0, -1.0]], top_k=2)[0].exp().tolist()
    assert kept == pytest.approx([0.731059, 0.268941, 0, 0], abs=1e-6)


def test_ties_go_to_the_lower_id_and_never_keep_more_than_asked() -> None:
    assert log_probs([[1.0, 1.0, 1.0, 1.0]], top_k=2)[0].isfinite().tolist() == [True, True, False, False]
    assert log_probs([[1.0, 1.0, 1.0, 1.0]], top_p=0.5)[0].isfinite().tolist() == [True, True, False, False]
    assert log_probs([[0.0, 3.0, 3.0]], temperature=0.0)[0].tolist() == [-math.inf, 0.0, -math.inf]


def test_padding_of_the_vocabulary_has_no_mass() -> None:
    values = log_probs([[0.0] * 8], limit=5)[0]
    assert values[:5].tolist() == pytest.approx([-1.609438] * 5, abs=1e-6)
    assert values[5:].tolist() == [-math.inf] * 3
    assert log_probs([[0.0] * 8], limit=8)[0, 0].item() == pytest.approx(-2.079442, abs=1e-6)


def test_limits_larger_than_the_vocabulary_change_nothing() -> None:
    assert torch.equal(log_probs([[1.0, 2.0]], top_k=50), log_probs([[1.0, 2.0]]))


def test_logits_are_not_changed() -> None:
    logits = torch.randn(3, 10)
    before = logits.clone()
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(temperature=0.3)]
    sampling.log_probs(logits, sampling.Filters.of(params), 7)
    assert torch.equal(logits, before)


def test_rows_of_different_parameters_match_the_slow_twin() -> None:
    rng = random.Random(1)
    logits = [[rng.choice([rng.gauss(0, 2), float(rng.randint(-2, 2))]) for _ in range(30)] for _ in range(200)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 1, 3, 29]), top_p=rng.choice([1, 0.9, 0.4])
        )
        for _ in logits
    ]
    fast = sampling.log_probs(torch.tensor(logits), sampling.Filters.of(params))
    slow = [slow_log_probs(row, p.temperature, p.top_k, p.top_p) for row, p in zip(logits, params, strict=True)]
    expected = torch.tensor(slow)
    assert torch.equal(fast.isfinite(), expected.isfinite())
    kept = fast.isfinite()
    torch.testing.assert_close(fast[kept], expected[kept], atol=1e-5, rtol=0)
    assert fast.dtype == torch.float32


def test_half_precision_logits_give_single_precision_log_probs() -> None:
    logits = torch.randn(2, 9).bfloat16()
    filters = sampling.Filters.of([SamplingParams()] * 2)
    assert torch.equal(sampling.log_probs(logits, filters), logits.float().log_softmax(-1))


def test_impossible_parameters_are_all_reported() -> None:
    bad = [SamplingParams(temperature=-1.0), SamplingParams(top_k=-2), SamplingParams(top_p=0.0)]
    with pytest.raises(ValueError, match=r"temperature=-1.0.*top_k=-2.*top_p=0.0") as caught:
        sampling.Filters.of([*bad, SamplingParams(temperature=float("nan"))])
    assert "temperature=nan" in str(caught.value)


def test_draw_inverts_the_cumulative_distribution_at_its_edges() -> None:
    values = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).log()
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.9999, 1 - 2**-53], dtype=torch.float64)
    drawn = sampling.draw(values.expand(5, -1), uniforms)
    assert drawn.tolist() == [1, 1, 3, 3, 3]


def test_draws_follow_the_distribution() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    n = 20000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = sampling.draw(values.expand(n, -1), uniforms).bincount(minlength=40)
    expected = values.exp() * n
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 73  # the 0.999 quantile for 39 degrees of freedom is 72.1
