"""Every option of the algorithm changes the number that it claims to change, and leaves the others alone."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.algorithms.segments import Segments
from hybridrl.config.schema import AlgorithmConfig, Config, TrainerConfig
from hybridrl.rollout.samples import Finish, Group, Prompt, Sample
from hybridrl.training.batch import mini_batches, with_selection, with_weights
from hybridrl.training.correction import correct
from hybridrl.training.estimate import with_advantages
from hybridrl.training.losses import make_loss
from hybridrl.training.microbatch import make_micro_batch
from hybridrl.training.rows import rows_from_samples

REWARDS = {1: [1.0, 0.0, 0.4], 2: [0.0, 0.0, 2.0], 3: [1.0, 1.0, 1.0]}
GREEDY = {1: 0.7, 2: 1.5, 3: 1.0}


def make_groups() -> list[Group]:
    """Three groups of three responses of 1 to 6 tokens; one response was cut at the limit."""

    def sample(prompt: int, index: int, reward: float) -> Sample:
        tokens = 1 + (2 * prompt + index) % 6
        return Sample(
            prompt=Prompt(id=prompt, token_ids=(1, 2)),
            index=index,
            response_ids=list(range(tokens)),
            log_probs=[-1.0] * tokens,
            versions=[0] * tokens,
            finish=Finish.LENGTH if (prompt, index) == (2, 2) else Finish.STOP,
            reward=reward,
        )

    return [
        Group(samples=tuple(sample(p, i, r) for i, r in enumerate(rewards)), greedy=sample(p, 3, GREEDY[p]))
        for p, rewards in REWARDS.items()
    ]


def numbers(algorithm: AlgorithmConfig) -> dict[str, list[float]]:
    """What an update computes: rewards' advantages, importance, trained tokens, the loss, its gradient by token."""
    rng, groups = np.random.default_rng(2), make_groups()
    rows = rows_from_samples((s for g in groups for s in g.samples), filter_truncated=algorithm.overlong.filter)
    noise = {name: [rng.normal(0, 0.4, len(r)).astype(np.float32) for r in rows] for name in ("old", "ref", "new")}
    engine = [r.fields["rollout_log_probs"] for r in rows]
    trainers = [e + n for e, n in zip(engine, noise["old"], strict=True)]
    old = engine if algorithm.old_log_probs == "engine" else trainers
    rows = [
        r.with_fields(old_log_probs=o, ref_log_probs=o + n) for r, o, n in zip(rows, old, noise["ref"], strict=True)
    ]
    rows, _ = correct(rows, algorithm.correction)
    rows, _ = with_advantages(rows, groups, algorithm, kl_coef=algorithm.kl.coef)
    (rows,) = mini_batches(rows, TrainerConfig(prompts_per_step=3), 1)
    rows = with_weights(
        with_selection(rows, Config(algorithm=algorithm), 1, 0), algorithm.aggregate, algorithm.aggregate_length or 8
    )
    loss = make_loss(algorithm, 8)
    batch = make_micro_batch(rows, range(len(rows)), (*loss.fields, "weights"), packing=True)
    new = torch.zeros(batch.mask.shape)
    for place, (b, s) in enumerate(batch.starts):
        values = torch.from_numpy(trainers[place] + noise["new"][place])
        new[b, s : s + len(values) - 1] = values[1:]
    new.requires_grad_()
    entropy = (1.5 * new).neg()
    value, _ = loss(new, entropy, batch.fields, batch.mask, 1 / max(1, int(batch.mask.sum())), batch.segments)
    value.backward()
    return {
        "advantages": [float(a) for r in rows for a in r.fields["advantages"][r.mask]],
        "importance": [float(w) for r in rows if "importance" in r.fields for w in r.fields["importance"][r.mask]],
        "trained": [float(m) for r in rows for m in r.mask],
        "loss": [value.item()],
        "gradient": new.grad.flatten().tolist(),
    }


def changed(base: dict[str, Any], options: dict[str, Any]) -> set[str]:
    before, after = (numbers(configured(o)) for o in (base, {**base, **options}))
    return {name for name in before if before[name] != after[name]}


def configured(options: dict[str, Any]) -> AlgorithmConfig:
    algorithm = AlgorithmConfig()
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        setattr(getattr(algorithm, section) if section else algorithm, name, value)
    return algorithm


UPDATE = {"loss", "gradient"}
ALL = {"advantages", *UPDATE}
KL = {"kl.where": "loss", "kl.coef": 0.1}
TIS = {"correction.weight": "token"}
REJECT = {"correction.reject": "token"}
COV = {"covariance.fraction": 0.1, "covariance.low": -10.0, "covariance.high": 10.0}

WALK: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    # what is set before, the option, what it changes
    *(({}, {"advantage": name}, ALL) for name in ("rloo", "reinforce", "remax", "opo", "gpg")),
    *(({}, {"normalize": name}, ALL) for name in ("population_std", "batch_std", "none")),
    ({"advantage": "pass_at_k", "pass_k": 1}, {"pass_k": 2}, ALL),
    ({}, {"whiten": True}, ALL),
    ({}, {"old_log_probs": "engine"}, UPDATE),
    *(({}, {"policy_loss": name}, UPDATE) for name in ("gspo", "cispo", "policy_gradient")),
    *((COV, {"policy_loss": name}, UPDATE) for name in ("clip_cov", "kl_cov")),
    ({}, {"clip_low": 0.5}, UPDATE),
    ({}, {"clip_high": 0.5}, UPDATE),
    ({}, {"dual_clip": 1.01}, UPDATE),
    ({**COV, "policy_loss": "clip_cov"}, {"covariance.fraction": 0.5}, UPDATE),
    ({**COV, "policy_loss": "clip_cov", "covariance.fraction": 1.0}, {"covariance.low": 0.0}, UPDATE),
    ({**COV, "policy_loss": "clip_cov", "covariance.fraction": 1.0}, {"covariance.high": 0.0}, UPDATE),
    ({**COV, "policy_loss": "kl_cov"}, {"covariance.coef": 3.0}, UPDATE),
    *(
        ({"aggregate_length": 5}, {"aggregate": name}, UPDATE)
        for name in ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    ),
    ({"aggregate": "seq_mean_token_sum_norm"}, {"aggregate_length": 5}, UPDATE),
    ({}, {"entropy_coef": 0.1}, UPDATE),
    ({"kl.coef": 0.1}, {"kl.where": "loss"}, UPDATE),
    ({"kl.coef": 0.1}, {"kl.where": "reward"}, ALL),
    ({"kl.coef": 0.1}, {"kl.where": "return"}, ALL),
    (KL, {"kl.coef": 0.2}, UPDATE),
    (KL, {"kl.estimator": "k2"}, UPDATE),
    ({**KL, "kl.where": "reward"}, {"kl.coef": 0.2}, ALL),
    ({"overlong.max_length": 6}, {"overlong.cache": 3}, ALL),
    ({"overlong.max_length": 6, "overlong.cache": 3}, {"overlong.max_length": 5}, ALL),
    ({"overlong.max_length": 6, "overlong.cache": 3}, {"overlong.factor": 2.0}, ALL),
    ({}, {"overlong.filter": True}, {"trained", *ALL}),
    *(({}, {"correction.weight": level}, {"importance", *UPDATE}) for level in ("token", "sequence", "geometric")),
    (TIS, {"correction.weight_low": 0.9}, {"importance", *UPDATE}),
    (TIS, {"correction.weight_high": 1.1}, {"importance", *UPDATE}),
    (
        {"correction.reject_low": 0.8, "correction.reject_high": 1.3},
        {"correction.reject": "token"},
        {"trained", *ALL},
    ),
    ({"correction.reject_low": 0.8}, {"correction.reject": "sequence"}, {"trained", *ALL}),
    ({"correction.reject_low": 0.9}, {"correction.reject": "geometric"}, {"trained", *ALL}),
    (REJECT, {"correction.reject_low": 0.95}, {"trained", *ALL}),
    (REJECT, {"correction.reject_high": 1.05}, {"trained", *ALL}),
]

ELSEWHERE = {
    *("name", "kl.target", "kl.gain", "routing_replay"),
    *(f"dynamic_sampling.{f.name}" for f in fields(AlgorithmConfig().dynamic_sampling)),
}
"""Options that are no part of a single update: tests of their own show what they change."""


@pytest.mark.parametrize(
    ("base", "option", "claimed"), WALK, ids=[",".join(f"{k}={v}" for k, v in w[1].items()) for w in WALK]
)
def test_an_option_changes_what_it_claims_and_nothing_else(
    base: dict[str, Any], option: dict[str, Any], claimed: set[str]
) -> None:
    # Leaving out tokens shortens the list of advantages: that is what `trained` is about.
    assert changed(base, option) == claimed


def test_the_walk_leaves_no_option_out() -> None:
    keys = set()
    for field in fields(AlgorithmConfig):
        value = getattr(AlgorithmConfig(), field.name)
        keys |= {f"{field.name}.{f.name}" for f in fields(value)} if is_dataclass(value) else {field.name}
    assert keys - ELSEWHERE <= {key for _, option, _ in WALK for key in option}
    assert {key for _, option, _ in WALK for key in option} <= keys


def test_the_coefficient_of_the_hour_takes_the_place_of_the_configured_one() -> None:
    algorithm = configured(KL)
    log_probs = torch.tensor([[-1.0]])
    known = {name: torch.zeros(1, 1) for name in ("advantages", "old_log_probs", "ref_log_probs")}
    known["weights"] = torch.ones(1, 1)
    segments = Segments(torch.zeros((1, 1), dtype=torch.long), 1)
    losses = [
        make_loss(algorithm, 8, kl_coef=coef)(log_probs, log_probs, known, torch.ones(1, 1).bool(), 1.0, segments)[0]
        for coef in (None, 0.1, 0.2, 0.0)
    ]
    assert losses[0] == losses[1] == losses[2] / 2
    assert losses[3] == 0
