"""Advantages by token: from values and rewards, and from a teacher, over rows with masks of any kind."""

import math

import numpy as np
import pytest
import torch

from hybridrl.config.schema import Config
from hybridrl.rollout.samples import Finish, Group, Prompt, Sample
from hybridrl.training.rows import Row, rows_from_samples
from hybridrl.training.token_estimate import credit


def make(rewards, masks, config):
    """One group of samples with these rewards and masks, and its rows with values, log-probs and a teacher's."""
    prompt = Prompt(id=0, token_ids=(1, 2))
    samples = [
        Sample(
            prompt=prompt,
            index=i,
            response_ids=[3] * len(mask),
            log_probs=[-1.0] * len(mask),
            versions=[0] * len(mask),
            finish=Finish.STOP,
            mask=list(mask),
            reward=reward,
            failed=reward is None,
        )
        for i, (reward, mask) in enumerate(zip(rewards, masks, strict=True))
    ]
    rng = np.random.default_rng(0)
    names = ("values", "old_log_probs", "ref_log_probs", "teacher_log_probs")
    rows = [row.with_fields(**{n: rng.normal(size=len(row)) for n in names}) for row in rows_from_samples(samples)]
    return rows, [Group(samples=tuple(samples))], config


def ppo(gamma=0.9, lam=0.8, where="none"):
    config = Config()
    config.algorithm.name, config.algorithm.advantage = "ppo", "gae"
    config.algorithm.kl.where, config.algorithm.kl.estimator = where, "k1"
    config.critic.gamma, config.critic.lam = gamma, lam
    return config


MASKS = [[True, True, False, True], [True], [False, True, False]]


def own(row: Row, name: str) -> list[float]:
    return [float(x) for x in row.fields[name][row.mask]]


@pytest.mark.parametrize("where", ["none", "reward"])
def test_rewards_stand_on_the_last_own_token_and_divergence_on_each(where):
    rows, groups, config = make([1.0, -2.0, 0.5], MASKS, ppo(where=where))
    found, metrics = credit(rows, groups, config, kl_coef=0.3)
    for row, reward in zip(found, [1.0, -2.0, 0.5], strict=True):
        values = own(row, "values")
        gaps = [a - b for a, b in zip(own(row, "old_log_probs"), own(row, "ref_log_probs"), strict=True)]
        rewards = [-0.3 * gap if where == "reward" else 0.0 for gap in gaps]
        rewards[-1] += reward
        advantage, after = 0.0, 0.0
        expected = []
        for r, v in zip(reversed(rewards), reversed(values), strict=True):
            advantage = r + 0.9 * after - v + 0.9 * 0.8 * advantage
            after = v
            expected.append(advantage)
        expected.reverse()
        assert own(row, "advantages") == pytest.approx(expected, abs=1e-5)
        assert own(row, "returns") == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-5)
        assert not row.fields["advantages"][~row.mask].any()
    assert metrics["value/mean"] == pytest.approx(np.mean([x for row in rows for x in own(row, "values")]), abs=1e-6)
    assert -10 < metrics["value/explained_variance"] < 1


def test_a_failed_sample_has_neither_advantage_nor_part_in_a_metric():
    rows, groups, config = make([1.0, None, 0.5], MASKS, ppo())
    found, metrics = credit(rows, groups, config)
    assert not found[1].fields["advantages"].any()
    alone, one, _ = make([1.0, None, 0.5], MASKS, ppo())
    alone[1] = alone[1].with_fields(values=math.nan)
    assert credit(alone, one, config)[1] == metrics


def test_a_batch_without_trained_tokens_is_no_error():
    rows, groups, config = make([None, None], MASKS[:2], ppo())
    found, metrics = credit(rows, groups, config)
    assert not any(row.fields["advantages"].any() for row in found)
    assert math.isnan(metrics["value/explained_variance"])


def test_whitened_advantages_leave_the_returns_as_they_are():
    rows, groups, config = make([1.0, -2.0, 0.5], MASKS, ppo())
    plain, _ = credit(rows, groups, config)
    config.algorithm.whiten = True
    white, _ = credit(rows, groups, config)
    values = torch.tensor([x for row in white for x in own(row, "advantages")])
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    assert values.std().item() == pytest.approx(1, abs=1e-5)
    assert [own(a, "returns") for a in white] == [own(b, "returns") for b in plain]


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_a_teachers_log_probs_are_learnt_from_and_rewards_are_not(discount):
    config = Config()
    config.algorithm.name, config.algorithm.advantage = "distill", "reverse_kl"
    config.teacher.discount = discount
    rows, groups, config = make([1.0, -2.0, 0.5], MASKS, config)
    found, metrics = credit(rows, groups, config)
    gaps = [[t - p for t, p in zip(own(r, "teacher_log_probs"), own(r, "old_log_probs"), strict=True)] for r in rows]
    for row, gap in zip(found, gaps, strict=True):
        expected = [sum(discount**k * g for k, g in enumerate(gap[i:])) for i in range(len(gap))]
        assert own(row, "advantages") == pytest.approx(expected, abs=1e-5)
    assert metrics["kl/teacher"] == pytest.approx(-np.mean([g for gap in gaps for g in gap]), abs=1e-6)


def test_other_kinds_compare_groups():
    rows, groups, _ = make([1.0, 0.0, 0.5], MASKS, Config())
    found, _ = credit(rows, groups, Config())
    assert own(found[0], "advantages") == pytest.approx([1.0] * 3, abs=1e-4)
