"""Mismatch of trainer and engine: what is measured, weighted, left out, and too far."""

import math

import numpy as np
import pytest

from hybridrl.config.schema import CorrectionConfig, LimitsConfig
from hybridrl.training.batch import with_weights
from hybridrl.training.correction import correct
from hybridrl.training.mismatch import beyond, mismatch
from hybridrl.training.rows import Row


def row(index, log_ratios, mask=None):
    """A prompt of one token, and a response with these log-ratios of trainer to engine."""
    n = len(log_ratios) + 1
    mask = [True] * len(log_ratios) if mask is None else mask
    engine = np.full(n, -1.0, np.float32)
    fields = {
        "rollout_log_probs": engine,
        "old_log_probs": engine + np.array([math.nan, *log_ratios], np.float32),
    }
    return Row(index=index, token_ids=np.zeros(n, np.int64), mask=np.array([False, *mask]), fields=fields)


def weights_of(rows):
    return [r.fields["importance"][r.mask].tolist() for r in rows]


def test_nothing_is_done_unasked():
    rows = [row(0, [0.5])]
    assert correct(rows, CorrectionConfig()) == (rows, {})


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("token", [[1.105171, 1.349859, 0.904837], [2.0, 0.5]]),
        ("sequence", [[1.349859] * 3, [1.0] * 2]),
        ("geometric", [[1.105171] * 3, [1.0] * 2]),
    ],
)
def test_weights_are_truncated_on_both_sides(weight, expected):
    config = CorrectionConfig(weight=weight, weight_low=0.5, weight_high=2.0)
    rows, metrics = correct([row(0, [0.1, 0.3, -0.1]), row(1, [math.log(10), math.log(0.1)])], config)
    assert weights_of(rows) == [pytest.approx(w, abs=1e-5) for w in expected]
    assert metrics["correction/truncated"] == (2 / 5 if weight == "token" else 0)
    assert metrics["correction/weight_mean"] == pytest.approx(sum(map(sum, expected)) / 5, abs=1e-5)


def test_a_response_that_passes_as_a_whole_still_has_its_tokens_truncated():
    config = CorrectionConfig(
        weight="token", weight_low=0.5, weight_high=2.0, reject="geometric", reject_low=0.9, reject_high=1.1
    )
    rows, metrics = correct([row(0, [math.log(10), math.log(0.1)]), row(1, [200.0, 200.0])], config)
    assert weights_of(rows)[0] == pytest.approx([2.0, 0.5])
    assert [r.trained for r in rows] == [2, 0]
    assert metrics["correction/rejected"] == 0.5
    assert all(np.isfinite(r.fields["importance"]).all() for r in rows)


def test_rejected_tokens_leave_the_numerator_and_the_denominator():
    config = CorrectionConfig(weight="token", weight_high=2.0, reject="token", reject_low=0.95, reject_high=2.0)
    rows, _ = correct([row(0, [0.1, 0.3, -0.1]), row(1, [3.0, -3.0])], config)
    weighted = with_weights(rows, "token_mean", None)
    total = sum(float((r.fields["weights"] * r.fields["importance"])[r.mask].sum()) for r in weighted)
    assert total == pytest.approx(1.227515, abs=1e-6)  # (e^.1 + e^.3) / 2 kept, not / 5


@pytest.mark.parametrize(("reject", "kept"), [("token", [2, 1]), ("sequence", [0, 2]), ("geometric", [3, 2])])
def test_what_is_rejected_depends_on_the_level(reject, kept):
    config = CorrectionConfig(reject=reject, reject_low=0.8, reject_high=1.25)
    rows, _ = correct([row(0, [0.2, 0.3, 0.1]), row(1, [0.3, -0.2])], config)
    assert [r.trained for r in rows] == kept
    assert "importance" not in rows[0].fields


def test_tokens_that_are_not_trained_count_nowhere():
    config = CorrectionConfig(weight="sequence", weight_high=10)
    rows, _ = correct([row(0, [0.1, math.nan, 0.2], [True, False, True])], config)
    assert weights_of(rows) == [pytest.approx([math.exp(0.3)] * 2)]
    assert rows[0].trained == 2


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_batch_without_trained_tokens_is_left_alone(level):
    config = CorrectionConfig(weight=level, reject=level)
    rows, metrics = correct([row(0, [1.0], [False]), row(1, [])], config)
    assert [r.trained for r in rows] == [0, 0]
    assert set(metrics.values()) == {0.0}


def test_mismatch_is_over_trained_tokens_only():
    found = mismatch([row(0, [9.0, 0.5, math.nan], [False, True, False]), row(1, [-0.5])])
    p, q = math.exp(0.5), math.exp(-0.5)
    assert found == pytest.approx(
        {
            "mismatch/logprob_abs_mean": 0.5,
            "mismatch/logprob_abs_max": 0.5,
            "mismatch/kl": ((p - 1 - 0.5) + (q - 1 + 0.5)) / 2,
            "mismatch/ess": (p + q) ** 2 / (2 * (p * p + q * q)),
            "mismatch/ess_sequence": (p + q) ** 2 / (2 * (p * p + q * q)),
        }
    )


def test_equal_models_have_no_mismatch_and_so_has_nothing():
    expected = {"mismatch/logprob_abs_mean": 0, "mismatch/logprob_abs_max": 0, "mismatch/kl": 0}
    expected |= {"mismatch/ess": 1, "mismatch/ess_sequence": 1}
    assert mismatch([row(0, [0.0, 0.0]), row(1, [0.0])]) == expected
    assert mismatch([]) == mismatch([row(0, [5.0], [False])]) == expected


def test_longer_responses_are_worth_less_as_wholes():
    found = mismatch([row(0, [0.1] * 20), row(1, [-0.1] * 20)])
    assert found["mismatch/ess_sequence"] < 0.6 < 0.98 < found["mismatch/ess"]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (LimitsConfig(), []),
        (LimitsConfig(mean=0.5, max=0.5, kl=1, ess=0.5), []),
        (LimitsConfig(mean=0.49), ["mismatch/logprob_abs_mean is 0.5, over mismatch.stop.mean=0.49"]),
        (LimitsConfig(max=0.4, kl=0.1), ["logprob_abs_max is 0.5, over", "mismatch/kl is 0.148721, over"]),
        (LimitsConfig(ess=1.0), []),
    ],
)
def test_what_exceeds_a_limit_is_named(limits, words):
    found = beyond(mismatch([row(0, [0.5, 0.5])]), limits, "mismatch.stop")
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text


def test_a_small_sample_size_is_under_its_limit():
    (text,) = beyond(mismatch([row(0, [2.0, -2.0])]), LimitsConfig(ess=0.9), "mismatch.warn")
    assert "mismatch/ess is 0.5" in text
    assert "under mismatch.warn.ess=0.9" in text
    assert len(beyond(mismatch([row(0, [math.nan])]), LimitsConfig(mean=9, max=9, kl=9, ess=0.1), "x")) == 4
