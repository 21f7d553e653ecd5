"""Scoring samples: sums, failures, what judges may read, metrics."""

import math

import pytest

from hybridrl.config.schema import JudgeConfig, RewardsConfig
from hybridrl.rewards.score import Judges, own_text, reward_metrics
from hybridrl.rollout.samples import Finish, Prompt, Sample

OBEY = "tests.rewards.bad_judges:obey"
FIFTH = "tests.rewards.bad_judges:fifth"


class Letters:
    """A tokenizer whose ids are code points; 0 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


def sample(text: str, answer: str | None = None, mask: list[bool] | None = None) -> Sample:
    ids = [ord(character) for character in text]
    return Sample(
        prompt=Prompt(id=0, token_ids=(1,), answer=answer),
        index=0,
        response_ids=ids,
        log_probs=[0.0] * len(ids),
        versions=[0] * len(ids),
        finish=Finish.STOP,
        mask=mask or [],
    )


def configured(**changes: object) -> RewardsConfig:
    config = RewardsConfig(judges=[JudgeConfig(name=OBEY, weight=2.0), JudgeConfig(name=FIFTH, weight=10.0)], workers=1)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def test_rewards_are_weighted_sums() -> None:
    samples = [sample("abc"), sample("dict:")]
    with Judges(configured()) as judges:
        metrics = judges.score(samples, Letters())
        assert [s.reward for s in samples] == [2 * 3 + 2.0, 2 * 0.5 + 2.0]
        assert samples[1].rewards == {OBEY: 0.5, f"{OBEY}/format": 1.0, FIFTH: 0.2}
        assert not any(s.failed for s in samples)
        assert set(metrics.values()) == {0.0}
        assert judges.score([], Letters())["reward/errors"] == 0.0
        samples[0].rewards, samples[0].failed = {"old": 1.0}, True
        judges.score(samples[:1], Letters())  # a second time from a used state
        assert (samples[0].reward, samples[0].failed, set(samples[0].rewards)) == (8.0, False, {OBEY, FIFTH})


@pytest.mark.parametrize(("on_error", "reward", "failed"), [("default", -1.0, False), ("mask", None, True)])
def test_a_failure_costs_its_sample_what_is_declared(on_error: str, reward: float | None, failed: bool) -> None:
    samples = [sample("raise:"), sample("none:"), sample("hang:"), sample("os_exit:"), sample("ab")]
    with Judges(configured(on_error=on_error, default=-1.0, timeout_s=5.0)) as judges:
        metrics = judges.score(samples, Letters())
    assert [(s.reward, s.failed) for s in samples] == [(reward, failed)] * 4 + [(6.0, False)]
    assert samples[0].rewards == {FIFTH: 0.2}
    assert metrics["reward/errors"] == 4
    assert metrics["reward/timeouts"] == 1
    kinds = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("reward/errors/")}
    assert {kind for kind, value in kinds.items() if value == 1} == {"exception", "missing", "timeout", "died"}


def test_judges_read_the_policys_own_text_only() -> None:
    text = "I asked. 42 Done"
    mask = [True] * 9 + [False] * 2 + [True] * 5
    assert own_text(sample(text, mask=mask), Letters()) == "I asked. \n Done"
    samples = [sample(text, "42", mask), sample(text, "42")]
    with Judges(RewardsConfig(judges=[JudgeConfig(name="numeric")], workers=1)) as judges:
        judges.score(samples, Letters())
    assert [s.reward for s in samples] == [0.0, 1.0]


def test_nothing_arises_across_a_gap() -> None:
    assert own_text(sample("4x2", mask=[True, False, True]), Letters()) == "4\n2"


def test_special_tokens_are_not_read() -> None:
    assert own_text(sample("8\0"), Letters()) == "8"


def test_judges_of_one_name_are_told_apart() -> None:
    config = RewardsConfig(
        judges=[JudgeConfig(name=OBEY, args={"scale": 0.5}), JudgeConfig(name=OBEY, args={"scale": 2.0})], workers=1
    )
    one = sample("abcd")
    with Judges(config) as judges:
        judges.score([one], Letters())
    assert one.rewards == {OBEY: 2.0, f"{OBEY}_2": 8.0}
    assert one.reward == 10.0


def test_metrics_are_finite_for_any_samples() -> None:
    judged = [sample("a"), sample("b"), sample("c")]
    judged[0].reward, judged[1].reward = 1.0, 0.0
    judged[0].rewards = {"exact": 1.0}
    judged[1].rewards = {"exact": 0.0}
    assert reward_metrics(judged) == {"reward/mean": 0.5, "reward/std": 0.5, "reward/exact": 0.5}
    assert reward_metrics(judged[:1])["reward/std"] == 0.0
    assert all(math.isnan(value) for value in reward_metrics(judged[2:]).values())
    assert set(reward_metrics([])) == {"reward/mean", "reward/std"}


def test_a_judge_that_does_not_take_its_arguments_is_refused() -> None:
    config = RewardsConfig(judges=[JudgeConfig(name=OBEY, args={"color": "red"})], workers=1)
    with pytest.raises(ValueError, match="color"), Judges(config):
        pass
