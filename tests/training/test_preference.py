"""Losses of pairs and labels over micro-batches: the mean of the paper's loss, however a batch is cut."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.segments import Segments
from hybridrl.config.schema import PreferenceConfig
from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.preferences import Pair, Verdict
from hybridrl.training.microbatch import make_micro_batch
from hybridrl.training.preference import Pairs, ScoredPairs, Verdicts, pair_rows, scored_row, verdict_rows
from hybridrl.training.rows import rows_together

BETA = 0.5


def demonstration(rng, length):
    prompt = int(rng.integers(1, length - 1))
    mask = [False] * prompt + [True] + [bool(b) for b in rng.random(length - prompt - 2) < 0.7] + [True]
    return Demonstration(tuple(int(t) for t in rng.integers(0, 9, length)), tuple(mask))


def make_pairs():
    rng = np.random.default_rng(0)
    return [Pair(demonstration(rng, a), demonstration(rng, b), m) for a, b, m in [(5, 3, 0), (4, 7, 0.5), (3, 3, 1)]]


def with_reference(rows):
    rng = np.random.default_rng(1)
    return [row.with_fields(ref_log_probs=rng.normal(size=len(row)).astype(np.float32)) for row in rows]


def run(rows, loss, cut, packing, poison=None):
    """Loss, gradient by a table of bigram log-probs (or of values), and metrics, summed over micro-batches."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), {}
    share = 1 / sum(row.trained for row in rows)
    for places in cut:
        batch = make_micro_batch(rows, places, loss.fields, packing=packing, pad_multiple=3)
        log_p = table[batch.tokens].log_softmax(-1)
        log_probs = log_p.gather(-1, batch.labels[..., None])[..., 0]
        outputs = [log_probs] if isinstance(loss, ScoredPairs) else [log_probs, -(log_p.exp() * log_p).sum(-1)]
        if isinstance(loss, ScoredPairs):
            outputs = [table[batch.tokens, 0]]
        fields = batch.fields
        if poison is not None:
            outputs = [torch.where(batch.mask, x, poison) for x in outputs]
            fields = {name: torch.where(batch.mask, x, poison) for name, x in fields.items()}
        part, metrics = loss(*outputs, fields, batch.mask, share, Segments(torch.zeros_like(batch.tokens), 1))
        total = total + part
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    assert set(sums) == set(loss.metrics)
    (gradient,) = torch.autograd.grad(total, table)
    return total.item(), gradient, sums


def scores_of(rows, table, config):
    """[n] the score of each row, from its tokens one after another."""
    found = []
    for row in rows:
        log_p = table.log_softmax(-1)
        gains = [
            log_p[row.token_ids[i - 1], row.token_ids[i]]
            - (row.fields["ref_log_probs"][i] if config.loss != "simpo" else 0.0)
            for i in range(len(row))
            if row.mask[i]
        ]
        total = torch.stack(gains).sum()
        found.append(total / len(gains) if config.length_normalized else total)
    return torch.stack(found).double()


PAIR_LOSSES = {
    "dpo": lambda h: -logsigmoid(BETA * h),
    "cdpo": lambda h: -0.9 * logsigmoid(BETA * h) - 0.1 * logsigmoid(-BETA * h),
    "ipo": lambda h: (h - 1 / (2 * BETA)) ** 2,
    "simpo": lambda h: -logsigmoid(BETA * h - 0.3),
}
CUTS = [[[0, 1, 2, 3, 4, 5]], [[4, 5], [], [0, 1, 2, 3]], [[3, 2], [1, 0], [5, 4]]]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_pair_loss_is_the_mean_of_the_papers_over_pairs(name, normalized):
    config = PreferenceConfig(
        loss=name, beta=BETA, label_smoothing=0.1, target_margin=0.3, length_normalized=normalized
    )
    rows = with_reference(pair_rows(make_pairs(), length_normalized=normalized))
    value, gradient, metrics = run(rows, Pairs(config=config, count=3), CUTS[0], packing=True)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    scores = scores_of(rows, table, config)
    h = scores[0::2] - scores[1::2]
    expected = PAIR_LOSSES[name](h).mean()
    (expected_gradient,) = torch.autograd.grad(expected, table)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert metrics["loss/preference"] == pytest.approx(value)
    assert metrics["reward/chosen"] == pytest.approx(BETA * scores[0::2].mean().item(), rel=1e-4)
    assert metrics["reward/margin"] == pytest.approx(BETA * h.mean().item(), rel=1e-4, abs=1e-6)
    assert metrics["reward/accuracy"] == pytest.approx((h > 0).double().mean().item())


def losses():
    return {
        "pairs": (with_reference(pair_rows(make_pairs())), Pairs(config=PreferenceConfig(beta=BETA), count=3)),
        "scored": (pair_rows(make_pairs(), scored=True), ScoredPairs(count=3)),
        "verdicts": (verdicts(), Verdicts(config=PreferenceConfig(loss="kto", beta=BETA), count=6, desirable=3)),
    }


def verdicts():
    made = [v for pair in make_pairs() for v in (Verdict(pair.chosen, True), Verdict(pair.rejected, False))]
    return [row.with_fields(divergence=0.2) for row in with_reference(verdict_rows(made))]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("cut", CUTS[1:])
@pytest.mark.parametrize("kind", ["pairs", "scored", "verdicts"])
def test_shares_add_up_however_a_batch_is_cut(kind, cut, packing):
    rows, loss = losses()[kind]
    value, gradient, metrics = run(rows, loss, CUTS[0], packing=True)
    cut_value, cut_gradient, cut_metrics = run(rows, loss, cut, packing)
    assert cut_value == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-5, atol=1e-7)
    assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["pairs", "scored", "verdicts"])
def test_nothing_outside_the_mask_counts(kind, poison):
    rows, loss = losses()[kind]
    clean, dirty = (run(rows, loss, CUTS[1], True, p) for p in (None, poison))
    assert clean[0] == dirty[0]
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]


def test_kto_is_the_mean_of_the_papers_over_responses():
    rows = verdicts()
    config = PreferenceConfig(loss="kto", beta=BETA, desirable_weight=1.5)
    value, gradient, metrics = run(rows, Verdicts(config=config, count=6, desirable=3), CUTS[2], packing=True)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    scores = scores_of(rows, table, config)
    good, bad = scores[0::2], scores[1::2]
    expected = (1.5 * (1 - torch.sigmoid(BETA * (good - 0.2)))).sum() + (1 - torch.sigmoid(BETA * (0.2 - bad))).sum()
    (expected_gradient,) = torch.autograd.grad(expected / 6, table)
    assert value == pytest.approx(expected.item() / 6, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert metrics["reward/undesirable"] == pytest.approx(BETA * bad.mean().item(), rel=1e-4)


def test_a_reward_model_is_asked_after_the_last_token():
    row = scored_row(0, (4, 5, 6))
    assert row.mask.tolist() == [False, False, False, True]
    batch = make_micro_batch([row], [0], (), packing=True)
    assert batch.tokens[batch.mask].tolist() == [6]
    rows = pair_rows(make_pairs(), scored=True)
    margins = [0.0, 0.5, 1.0]
    value, _, metrics = run(rows, ScoredPairs(count=3), CUTS[0], packing=True)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    h = [float(table[p.chosen.token_ids[-1], 0] - table[p.rejected.token_ids[-1], 0]) for p in make_pairs()]
    assert metrics["reward/margin"] == pytest.approx(sum(h) / 3, rel=1e-5)
    assert value == pytest.approx(sum(math.log1p(math.exp(m - x)) for x, m in zip(h, margins, strict=True)) / 3)


def test_rows_of_a_pair_belong_together():
    assert rows_together(pair_rows(make_pairs())) == [[0, 1], [2, 3], [4, 5]]
    assert rows_together(verdicts()) == [[i] for i in range(6)]
