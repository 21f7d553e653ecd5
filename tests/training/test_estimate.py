"""From judged groups to advantages by token: shaping, divergence, whitening, and what a row must not lose."""

import numpy as np
import pytest

from hybridrl.config.schema import AlgorithmConfig, KlConfig, OverlongConfig
from hybridrl.rollout.samples import Finish, Group
from hybridrl.training.estimate import with_advantages
from hybridrl.training.rows import rows_from_samples
from tests.training.test_rows import make_sample


def group(prompt, rewards, lengths=None, greedy=None):
    lengths = lengths or [1] * len(rewards)
    return Group(
        samples=tuple(
            make_sample(prompt, i, [1], [2] * n, reward=r)
            for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))
        ),
        greedy=None if greedy is None else make_sample(prompt, len(rewards), [1], [2], reward=greedy),
    )


def rows_of(groups, gap=None):
    rows = rows_from_samples(sample for group in groups for sample in group.samples)
    if gap is None:
        return rows
    return [r.with_fields(old_log_probs=gap * np.arange(len(r)), ref_log_probs=0.0) for r in rows]


def advantages(groups, algorithm, gap=None, kl_coef=0.0):
    """[[advantage of each trained token] of each row], and the metrics."""
    rows, metrics = with_advantages(rows_of(groups, gap), groups, algorithm, kl_coef=kl_coef)
    return [row.fields["advantages"][row.mask].tolist() for row in rows], metrics


def test_groups_are_told_by_prompt_id_and_failed_samples_get_nothing():
    groups = [group(7, [1, 1]), group(9, [0, 1])]
    groups[1].samples[1].failed = True
    groups.append(group(9, [1]))  # the same prompt's: position does not matter
    found, _ = advantages(groups, AlgorithmConfig())
    assert found == [[0], [0], pytest.approx([-0.707106]), [], pytest.approx([0.707106])]


def test_unjudged_samples_are_refused():
    with pytest.raises(ValueError, match=r"without a reward .*\(4, 1\)"):
        advantages([group(4, [1, None])], AlgorithmConfig())


def test_divergence_in_the_reward_lowers_it_before_the_group_is_compared():
    algorithm = AlgorithmConfig(normalize="none", kl=KlConfig(where="reward", estimator="k1", coef=9.0))
    found, metrics = advantages([group(0, [1, 1], [1, 2])], algorithm, gap=1.0, kl_coef=0.5)
    # log-ratios are 1 on the first trained token and 2 on the second: divergences of 1 and 3
    assert found == [[0.5], [-0.5, -0.5]]
    assert metrics["kl/response"] == 2.0


def test_divergence_in_the_return_is_that_of_the_token_and_all_after_it():
    algorithm = AlgorithmConfig(advantage="reinforce", kl=KlConfig(where="return", estimator="k1"))
    found, _ = advantages([group(0, [1, 5], [3, 1])], algorithm, gap=1.0, kl_coef=0.5)
    assert found == [[1 - 3.0, 1 - 2.5, 1 - 1.5], [4.5]]


def test_divergence_in_the_loss_leaves_advantages_alone():
    algorithm = AlgorithmConfig(normalize="none", kl=KlConfig(where="loss"))
    found, metrics = advantages([group(0, [1, 0])], algorithm, gap=1.0, kl_coef=0.5)
    assert found == [[0.5], [-0.5]]
    assert metrics["kl/response"] > 0


def test_length_is_punished_in_the_reward_of_sampled_and_greedy_responses():
    overlong = OverlongConfig(cache=2, max_length=3, factor=1.0)
    algorithm = AlgorithmConfig(normalize="none", overlong=overlong)
    found, metrics = advantages([group(0, [1, 1], [1, 2])], algorithm)
    assert [row[0] for row in found] == [0.25, -0.25]
    assert metrics["reward/overlong"] == -0.25
    algorithm.advantage = "remax"
    found, _ = advantages([group(0, [1, 1], [1, 2], greedy=1)], algorithm)
    assert [row[0] for row in found] == [0.0, -0.5]


def test_truncated_samples_count_in_their_group_and_not_in_the_loss():
    groups = [group(0, [1, 0])]
    groups[0].samples[1].finish = Finish.LENGTH
    samples = groups[0].samples
    rows, _ = with_advantages(
        rows_from_samples(samples, filter_truncated=True), groups, AlgorithmConfig(normalize="none")
    )
    assert rows[0].fields["advantages"][rows[0].mask].tolist() == [0.5]
    assert rows[1].trained == 0


def test_whitening_is_over_the_tokens_of_all_rows():
    algorithm = AlgorithmConfig(advantage="reinforce", whiten=True)
    found, metrics = advantages([group(0, [1, 2], [1, 1]), group(1, [3, 3], [1, 0])], algorithm)
    assert found == [pytest.approx([-1]), pytest.approx([0], abs=1e-7), pytest.approx([1]), []]
    assert metrics["advantage/mean"] == 2.0
    long, _ = advantages([group(0, [1, 2], [3, 1])], algorithm)  # 1, 1, 1, 2: mean 1.25, deviation 0.5
    assert long == [pytest.approx([-0.5] * 3), pytest.approx([1.5])]


def test_the_greedy_response_of_the_same_prompt_is_the_baseline():
    algorithm = AlgorithmConfig(advantage="remax")
    groups = [group(3, [1, 0], greedy=1), group(4, [1, 0], greedy=0), group(5, [1])]
    assert advantages(groups, algorithm)[0] == [[0], [-1], [1], [0], [0]]
    groups[0].greedy.failed = True
    assert advantages(groups, algorithm)[0] == [[0], [0], [1], [0], [0]]


def test_the_best_baseline_weighs_rewards_by_trained_tokens():
    found, _ = advantages([group(0, [1, 0], [1, 3])], AlgorithmConfig(advantage="opo"))
    assert found == [[0.75], [-0.25] * 3]


def test_nothing_to_train_gives_nothing():
    rows, metrics = with_advantages(
        rows_of([group(0, [1, 0], [0, 0])]), [group(0, [1, 0], [0, 0])], AlgorithmConfig(whiten=True)
    )
    assert [row.trained for row in rows] == [0, 0]
    assert metrics == {"advantage/mean": 0.0, "advantage/std": 0.0}
