"""Each kind of run is told what it lacks and what has no effect on it."""

import re

import pytest

from hybridrl.config.batch import batch_arithmetic
from hybridrl.config.kinds import learns_from_pairs
from tests.config.test_validate import found, tiny

PPO = "algorithm=ppo"
DISTILL = "algorithm=distill teacher.path=builtin:tiny_moe"
DATA_ALONE = "warm_start.steps=0"
PREFERENCE = f"algorithm=preference {DATA_ALONE}"
REWARD_MODEL = f"algorithm=reward_model {DATA_ALONE}"

WRONG = [
    (1, f"{PPO} algorithm.advantage=grpo", ["algorithm.advantage=grpo with algorithm.name=ppo", "expected gae"]),
    (1, "algorithm.advantage=gae", ["algorithm.advantage=gae needs algorithm.name=ppo"]),
    (1, "algorithm.advantage=reverse_kl", ["algorithm.advantage=reverse_kl needs algorithm.name=distill"]),
    (1, "critic.lr=1e-3", ["critic.lr=0.001 has no effect with algorithm.name=grpo"]),
    (1, "critic.parallel.tp=2", ["critic.parallel.tp=2 has no effect with algorithm.name=grpo"]),
    (1, f"{PPO} critic.warmup_steps=60", ["critic.warmup_steps=60", "trainer.steps=60", "never be updated"]),
    (1, f"{PPO} critic.min_lr=1 optimizer.schedule=linear", ["critic.min_lr=1.0 is more than critic.lr=1e-05"]),
    (1, f"{PPO} critic.min_lr=1e-6", ["critic.min_lr=1e-06 has no effect", "optimizer.schedule=constant"]),
    (2, f"{PPO} critic.parallel.tp=3", ["the critic's layout", "parallel.tp=3", "world=2"]),
    (1, f"{PPO} critic.gamma=1.5", ["critic.gamma=1.5: must be in [0, 1]"]),
    (1, f"{PPO} critic.clip=0", ["critic.clip=0.0: must be more than 0"]),
    (1, f"{PPO} algorithm.normalize=none", ["algorithm.normalize=none has no effect with algorithm.name=ppo"]),
    (1, f"{PPO} algorithm.kl.where=return", ["algorithm.kl.where=return", "set reward"]),
    (1, f"{DISTILL} algorithm.kl.where=reward", ["algorithm.kl.where=reward with algorithm.name=distill"]),
    (1, "algorithm=distill", ["algorithm.name=distill needs teacher.path"]),
    (1, "teacher.path=builtin:tiny_moe", ["teacher.path=builtin:tiny_moe has no effect with algorithm.name=grpo"]),
    (1, f"{PPO} critic.path=nowhere", ["critic.path=nowhere: is no folder"]),
    (1, "rewards.judges=[{name: reward_model}]", ["rewards.judges[0].args: found none; a reward_model takes one"]),
    (
        1,
        "rewards.judges=[{name: reward_model, args: {api: word}}]",
        ["rewards.judges[0].args: found api; a reward_model"],
    ),
    (
        1,
        "rewards.judges=[{name: reward_model, args: {path: nowhere}}]",
        ["rewards.judges[0].args.path=nowhere: is no folder"],
    ),
    (1, "preference.beta=0.2", ["preference.beta=0.2 has no effect with algorithm.name=grpo"]),
    (1, "algorithm=preference", ["warm_start.steps=60 with algorithm.name=preference"]),
    (1, f"{PREFERENCE} algorithm.kl.where=loss", ["algorithm.kl.where=loss with algorithm.name=preference"]),
    (1, f"{PREFERENCE} preference.loss=cdpo", ["label_smoothing=0", "that is dpo"]),
    (1, f"{PREFERENCE} preference.label_smoothing=0.1", ["label_smoothing=0.1 has no effect with preference.loss=dpo"]),
    (1, f"{PREFERENCE} preference.target_margin=1", ["target_margin=1.0 has no effect", "only with simpo"]),
    (1, f"{PREFERENCE} preference.loss=simpo", ["length_normalized=false", "simpo"]),
    (1, f"{PREFERENCE} preference.desirable_weight=2", ["desirable_weight=2.0 has no effect", "only with kto"]),
    (1, f"{PREFERENCE} preference.loss=kto preference.undesirable_weight=0", ["half of the data"]),
    (1, f"{PREFERENCE} preference.loss=dpoo", ["preference.loss=dpoo", "did you mean 'dpo'?"]),
    (1, f"{PREFERENCE} data.margin_key=m", ["data.margin_key=m has no effect", "reward_model"]),
    (1, f"{PREFERENCE} trainer.micro_batch_size=1", ["trainer.micro_batch_size=1", "of a pair"]),
    (1, f"{PREFERENCE} trainer.max_tokens_per_micro_batch=40", ["cannot hold a pair", "= 24"]),
    (1, f"{PREFERENCE} data.source=reasoning_gym data.path=null data.task=a", ["makes no preferences"]),
    (1, f"{REWARD_MODEL} preference.beta=0.2", ["preference.beta=0.2 has no effect with algorithm.name=reward_model"]),
]


def split(overrides: str) -> list[str]:
    """Words, of which those in brackets hold spaces."""
    return re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", overrides)


@pytest.mark.parametrize(("ranks", "overrides", "words"), WRONG, ids=[f"{c[0]}:{c[1]}" for c in WRONG])
def test_a_mistake_in_a_kind_of_run_is_named(ranks: int, overrides: str, words: list[str]) -> None:
    texts = found(*split(overrides), ranks=ranks)
    for word in words:
        assert word in texts


RIGHT = [
    f"{PPO} critic.warmup_steps=5 critic.clip=null critic.lr=1e-3 critic.min_lr=1e-4 optimizer.schedule=cosine",
    f"{PPO} critic.parallel.tp=2 rollout.n=1",
    f"{DISTILL} rewards.judges=[]",
    f"{PREFERENCE} preference.holdout=5",
    f"{PREFERENCE} preference.loss=cdpo preference.label_smoothing=0.1 preference.reference=on_the_fly",
    f"{PREFERENCE} preference.loss=simpo preference.length_normalized=true preference.target_margin=0.5",
    f"{PREFERENCE} preference.loss=kto preference.desirable_weight=1.5 trainer.micro_batch_size=1",
    f"{REWARD_MODEL} preference.holdout=5 data.margin_key=margin",
]


@pytest.mark.parametrize("overrides", RIGHT)
def test_a_kind_of_run_takes_its_own_settings(overrides: str) -> None:
    assert found(*overrides.split(), ranks=2) == ""


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [("", 8), (REWARD_MODEL, 2), (PREFERENCE, 2), (f"{PREFERENCE} preference.loss=kto", 1)],
)
def test_a_pair_counts_as_two_samples(overrides: str, samples: int) -> None:
    config = tiny(1, *overrides.split())
    assert batch_arithmetic(config, 1).samples_per_update == 32 * samples
    assert learns_from_pairs(config) == (samples == 2)
