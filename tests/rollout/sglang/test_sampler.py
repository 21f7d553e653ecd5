"""The sampler's short way for greedy batches is the distribution's, and broken logits show."""

from dataclasses import dataclass

import torch

from hybridrl.rollout import sampling
from hybridrl.rollout.samples import SamplingParams
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang


@dataclass
class _Row:
    params: SamplingParams
    uniform: float


def _rows(*params: SamplingParams) -> list[_Row]:
    return [_Row(p, 0.37) for p in params]


def test_a_greedy_batch_is_drawn_as_the_distribution_says() -> None:
    from hybridrl.rollout.sglang.sampler import draw

    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    logits[2] = 1.0  # all equal: the first
    greedy, mixed = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)
    for limit in (None, 11):
        tokens, log_probs = draw(logits.clone(), _rows(*[greedy] * 4), limit)
        expected = sampling.log_probs(logits, sampling.Filters.of([greedy] * 4), limit)
        assert tokens.tolist() == expected.argmax(-1).tolist()
        assert log_probs.tolist() == [0.0] * 4
        also, _ = draw(logits.clone(), _rows(greedy, mixed, greedy, mixed), limit)
        assert also[[0, 2]].tolist() == tokens[[0, 2]].tolist()


def test_logits_that_are_not_finite_give_nan() -> None:
    from hybridrl.rollout.sglang.sampler import draw

    logits = torch.zeros(3, 5)
    logits[0, 2] = torch.nan
    logits[1, 2] = torch.inf
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
        tokens, log_probs = draw(logits.clone(), _rows(*[params] * 3), None)
        assert log_probs.isnan().tolist() == [True, True, False]
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 5
