"""The algorithm: options that contradict each other, have no effect, or would learn from wrong numbers."""

from collections.abc import Iterator, Mapping, Sequence

from hybridrl.config.schema import Config, CorrectionConfig
from hybridrl.config.validate.bounds import get

BY_GROUP = ("grpo", "rloo", "opo", "gpg", "pass_at_k")
"""Estimators that compare the samples of a prompt with each other."""

USERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "normalize": ("advantage", ("grpo", "gpg")),
    "pass_k": ("advantage", ("pass_at_k",)),
    "clip_low": ("policy_loss", ("ppo_clip", "gspo", "cispo", "clip_cov")),
    "clip_high": ("policy_loss", ("ppo_clip", "gspo", "cispo", "clip_cov")),
    "dual_clip": ("policy_loss", ("ppo_clip", "clip_cov")),
    "covariance.fraction": ("policy_loss", ("clip_cov", "kl_cov")),
    "covariance.low": ("policy_loss", ("clip_cov",)),
    "covariance.high": ("policy_loss", ("clip_cov",)),
    "covariance.coef": ("policy_loss", ("kl_cov",)),
}
"""Options of the algorithm that only some of our own estimators or losses look at."""

OWN: Mapping[str, Sequence[str]] = {
    "advantage": (*BY_GROUP, "reinforce", "remax"),
    "policy_loss": ("ppo_clip", "gspo", "cispo", "policy_gradient", "clip_cov", "kl_cov"),
}
"""Our own, whose options are known; further ones may be registered, and look at what they like."""


def updates_a_step(config: Config) -> int:
    """Optimizer updates that a step makes."""
    trainer = config.trainer
    return max(1, trainer.prompts_per_step // (trainer.mini_batch_prompts or trainer.prompts_per_step)) * (
        trainer.update_epochs
    )


def algorithm_problems(config: Config) -> Iterator[str]:
    """Mistakes in `algorithm` and `mismatch`, of a run that samples."""
    yield from _advantage(config)
    yield from _policy_loss(config)
    yield from _divergence(config)
    yield from _overlong(config)
    yield from _dynamic_sampling(config)
    yield from _correction(config)
    yield from _routing_replay(config)


def _routing_replay(config: Config) -> Iterator[str]:
    replay, old = config.algorithm.routing_replay, config.algorithm.old_log_probs
    if replay == "r2" and old == "engine":
        yield (
            "algorithm.routing_replay=r2 with algorithm.old_log_probs=engine: the pass whose experts are to be taken "
            "is left out; set algorithm.old_log_probs=trainer, or algorithm.routing_replay=r3 for the engine's experts"
        )
    if replay == "r3" and not config.rollout.routed_experts:
        yield (
            "algorithm.routing_replay=r3 takes the engine's experts, but rollout.routed_experts=false; set "
            "rollout.routed_experts=true"
        )


def _advantage(config: Config) -> Iterator[str]:
    algorithm, n = config.algorithm, config.rollout.n
    if algorithm.advantage in BY_GROUP and n == 1:
        yield (
            f"rollout.n=1 with algorithm.advantage={algorithm.advantage}: a group of one has no other sample to "
            "compare with, so every advantage is 0 and nothing is learnt; set rollout.n to 2 or more"
        )
    for key, (kind, users) in USERS.items():
        chosen = getattr(algorithm, kind)
        if chosen in OWN[kind] and chosen not in users:
            yield from _unused(config, [f"algorithm.{key}"], f"with algorithm.{kind}={chosen}")
    if algorithm.advantage == "pass_at_k":
        if algorithm.pass_k is None:
            yield "algorithm.pass_k is missing: algorithm.advantage=pass_at_k needs its k, from 1 to rollout.n"
        elif algorithm.pass_k > n:
            yield f"algorithm.pass_k={algorithm.pass_k} is more than rollout.n={n}: there is no subset of k samples"


def _policy_loss(config: Config) -> Iterator[str]:
    algorithm, updates = config.algorithm, updates_a_step(config)
    cov = algorithm.covariance
    if algorithm.policy_loss == "policy_gradient" and updates > 1:
        yield (
            f"algorithm.policy_loss=policy_gradient with {updates} updates a step: it has no ratio, so each update "
            "after the first would learn from another policy's samples; set trainer.mini_batch_prompts="
            f"{config.trainer.prompts_per_step} and trainer.update_epochs=1, or another loss"
        )
    if algorithm.policy_loss == "kl_cov" and updates == 1:
        yield (
            "algorithm.policy_loss=kl_cov with one update a step: the policy is the old one then, and the divergence "
            "it adds has no gradient; set trainer.mini_batch_prompts or trainer.update_epochs for more updates"
        )
    if cov.low > cov.high:
        yield f"algorithm.covariance.low={cov.low} is more than algorithm.covariance.high={cov.high}"


def _divergence(config: Config) -> Iterator[str]:
    kl = config.algorithm.kl
    if kl.where == "none":
        yield from _unused(config, ["algorithm.kl.target"], "with algorithm.kl.where=none")
    elif kl.coef == 0:
        yield (
            f"algorithm.kl.coef=0 with algorithm.kl.where={kl.where}: a reference model would be held for nothing; set "
            "a coefficient over 0, or algorithm.kl.where=none"
        )
    if kl.where == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator=k1 with algorithm.kl.where=loss: its gradient does not see the reference; set "
            "algorithm.kl.estimator=k2 or k3, or algorithm.kl.where=reward"
        )
    if kl.target is None:
        yield from _unused(config, ["algorithm.kl.gain"], "without algorithm.kl.target")


def _overlong(config: Config) -> Iterator[str]:
    overlong, longest = config.algorithm.overlong, config.rollout.max_response_length
    if overlong.cache is None:
        keys = ["algorithm.overlong.factor", "algorithm.overlong.max_length"]
        yield from _unused(config, keys, "without algorithm.overlong.cache")
        return
    limit = longest if overlong.max_length is None else overlong.max_length
    if overlong.cache > limit:
        yield f"algorithm.overlong.cache={overlong.cache} is more than the maximal length of {limit} tokens"
    elif limit - overlong.cache >= longest:
        yield (
            f"algorithm.overlong.max_length={limit} - algorithm.overlong.cache={overlong.cache} = "
            f"{limit - overlong.cache} tokens, which no response of rollout.max_response_length={longest} exceeds: "
            "nothing would be punished"
        )


def _dynamic_sampling(config: Config) -> Iterator[str]:
    sampling, prompts = config.algorithm.dynamic_sampling, config.trainer.prompts_per_step
    key = "algorithm.dynamic_sampling"
    if not sampling.enabled:
        names = ("max_generation_batches", "generation_prompts", "judge", "tolerance", "surplus")
        yield from _unused(config, [f"{key}.{name}" for name in names], f"without {key}.enabled=true")
        return
    if config.rollout.n == 1 and config.algorithm.advantage != "remax":
        yield f"rollout.n=1 with {key}: the rewards of a group of one never differ, so every group would be dropped"
    batch, most = sampling.generation_prompts or prompts, sampling.max_generation_batches
    if most and most * batch < prompts:
        yield (
            f"{key}.max_generation_batches={most} · {key}.generation_prompts={batch} = {most * batch} prompts cannot "
            f"fill a step of trainer.prompts_per_step={prompts}"
        )
    replicas = config.trainer.nodes * config.trainer.ranks_per_node // config.rollout.tp
    if batch < replicas:
        yield (
            f"{key}.generation_prompts={batch} leaves {replicas - batch} of the {replicas} replicas of the engine idle "
            f"(ranks / rollout.tp={config.rollout.tp}): one draws all samples of a prompt; set it to {replicas} or more"
        )
    judges = [judge.name for judge in config.rewards.judges]
    if sampling.judge is not None and sampling.judge.split("/")[0] not in judges:
        yield f"{key}.judge={sampling.judge} is no judge of this run; there are {', '.join(judges) or 'none'}"
    correction = config.algorithm.correction
    uncorrected = correction.weight == correction.reject == "none" and config.algorithm.old_log_probs == "trainer"
    if sampling.surplus == "keep" and uncorrected:
        yield (
            f"{key}.surplus=keep trains on samples of older weights as if they were new; set "
            "algorithm.correction.weight=token, or algorithm.old_log_probs=engine"
        )


def _correction(config: Config) -> Iterator[str]:
    correction, key = config.algorithm.correction, "algorithm.correction"
    yield from _interval(config, correction, "weight")
    yield from _interval(config, correction, "reject")
    if config.algorithm.old_log_probs != "engine":
        return
    for name in ("weight", "reject"):
        if (level := getattr(correction, name)) != "none":
            yield (
                f"{key}.{name}={level} with algorithm.old_log_probs=engine: the trainer's own log-probs, which a "
                "correction compares with the engine's, are not computed; set algorithm.old_log_probs=trainer"
            )
    limits = [f"mismatch.{kind}.{name}" for kind in ("warn", "stop") for name in ("mean", "max", "kl", "ess")]
    yield from _unused(config, limits, "with algorithm.old_log_probs=engine: the mismatch is not measured")


def _interval(config: Config, correction: CorrectionConfig, name: str) -> Iterator[str]:
    keys = [f"algorithm.correction.{name}_low", f"algorithm.correction.{name}_high"]
    low, high = (get(config, key) for key in keys)
    if getattr(correction, name) == "none":
        yield from _unused(config, keys, f"with algorithm.correction.{name}=none")
    elif low > high:
        yield f"{keys[0]}={low} is more than {keys[1]}={high}"
    elif not low <= 1 <= high:
        yield f"{keys[0]}={low} to {keys[1]}={high} leaves out 1, the weight where trainer and engine agree"


def _unused(config: Config, keys: Sequence[str], reason: str) -> Iterator[str]:
    """Those of `keys` that were set and have no effect."""
    for key in keys:
        if (value := get(config, key)) != get(Config(), key):
            yield f"{key}={value} has no effect {reason}"
