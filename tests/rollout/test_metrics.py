"""Metrics of samples, by hand."""

import pytest

from hybridrl.rollout.metrics import response_metrics, staleness_metrics
from hybridrl.rollout.samples import Finish, Prompt, Sample


def sample(prompt: int, index: int, tokens: list[int], finish: Finish = Finish.STOP, mask: list[bool] | None = None):
    return Sample(
        prompt=Prompt(id=prompt, token_ids=(1,)),
        index=index,
        response_ids=tokens,
        log_probs=[0.0] * len(tokens),
        versions=[0] * len(tokens),
        finish=finish,
        mask=mask or [],
    )


def test_metrics_of_two_groups() -> None:
    samples = [
        sample(1, 0, [5, 6]),
        sample(2, 0, [7]),
        sample(1, 1, [5, 6]),
        sample(2, 1, [8, 8, 8], Finish.LENGTH, [True, False, True]),
    ]
    assert response_metrics(samples) == {
        "response_length/mean": 2.0,
        "response_length/min": 1.0,
        "response_length/max": 3.0,
        "response_length/clipped": 0.25,
        "rollout/duplicates": 0.25,
        "tokens/generated": 7.0,
    }


def test_a_group_of_one_text_is_all_duplicates_but_the_first() -> None:
    assert response_metrics([sample(0, i, [4]) for i in range(8)])["rollout/duplicates"] == 7 / 8


def test_alike_responses_of_different_prompts_are_no_duplicates() -> None:
    assert response_metrics([sample(i, 0, [4]) for i in range(8)])["rollout/duplicates"] == 0


def test_empty_responses_count() -> None:
    metrics = response_metrics([sample(0, 0, [], Finish.LENGTH)])
    assert metrics["response_length/mean"] == 0
    assert metrics["response_length/clipped"] == 1


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="without samples"):
        response_metrics([])


def test_staleness_counts_weight_versions_of_own_tokens() -> None:
    samples = [sample(1, 0, [5, 6, 7]), sample(1, 1, [5, 6, 7], mask=[False, True, True])]
    samples[0].versions, samples[1].versions = [3, 4, 4], [1, 4, 4]
    assert staleness_metrics(samples, version=4) == {"staleness/mean": 0.2, "staleness/max": 1.0}
    assert staleness_metrics([], version=4) == {"staleness/mean": 0.0, "staleness/max": 0.0}
