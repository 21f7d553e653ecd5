"""Kinds of run: settings that a kind needs, and settings of another kind, which would have no effect."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

from hybridrl.config.critic import critic_config
from hybridrl.config.kinds import OWN_ADVANTAGES, PAIRED, is_supervised
from hybridrl.config.schema import AlgorithmConfig, Config, CriticConfig, PreferenceConfig, TeacherConfig
from hybridrl.config.validate.model import Model, model_problems
from hybridrl.config.validate.ranks import rank_problems

_MEASURES = ("holdout", "holdout_every")
_OWN = {
    "cdpo": ("label_smoothing",),
    "simpo": ("target_margin",),
    "kto": ("desirable_weight", "undesirable_weight"),
}
"""Settings of one preference loss alone."""


def objective_problems(config: Config, spec: Model | None) -> Iterator[str]:
    """Mistakes in what `algorithm.name` asks for."""
    name = config.algorithm.name
    yield from _advantage(config)
    if name == "ppo":
        yield from _critic(config, spec)
    else:
        yield from _idle("critic", config.critic, CriticConfig(), name)
    if name == "distill" and config.teacher.path is None:
        yield "algorithm.name=distill needs teacher.path, the Hugging Face folder of the teacher"
    elif name != "distill":
        yield from _idle("teacher", config.teacher, TeacherConfig(), name)
    if name == "preference":
        yield from _preference(config)
    else:
        kept = _MEASURES if name in PAIRED else ()
        yield from _idle("preference", config.preference, PreferenceConfig(), name, kept)
    if config.data.margin_key is not None and name != "reward_model":
        yield f"data.margin_key={config.data.margin_key} has no effect with algorithm.name={name}; set reward_model"
    if name in PAIRED and config.data.source == "reasoning_gym":
        yield f"data.source=reasoning_gym makes no preferences, which algorithm.name={name} learns from"


def _idle(section: str, found: Any, default: Any, name: str, kept: Sequence[str] = ()) -> Iterator[str]:
    """Keys of a section that differ from their defaults though the section has no effect."""
    for field in fields(found):
        value, usual = getattr(found, field.name), getattr(default, field.name)
        if is_dataclass(value):
            yield from _idle(f"{section}.{field.name}", value, usual, name)
        elif value != usual and field.name not in kept:
            yield f"{section}.{field.name}={value} has no effect with algorithm.name={name}"


def _advantage(config: Config) -> Iterator[str]:
    name, advantage = config.algorithm.name, config.algorithm.advantage
    if is_supervised(config):
        return
    if name in OWN_ADVANTAGES and advantage != OWN_ADVANTAGES[name]:
        yield (
            f"algorithm.advantage={advantage} with algorithm.name={name}: expected {OWN_ADVANTAGES[name]} "
            f"(algorithm={name} sets both)"
        )
    for key in ("normalize", "pass_k"):
        value = getattr(config.algorithm, key)
        if name in OWN_ADVANTAGES and value != getattr(AlgorithmConfig(), key):
            yield f"algorithm.{key}={value} has no effect with algorithm.name={name}: no group is compared"
    if name == "ppo" and config.algorithm.kl.where == "return":
        yield "algorithm.kl.where=return with algorithm.name=ppo: its returns are those of rewards; set reward"
    if name == "distill" and config.algorithm.kl.where in ("reward", "return"):
        yield f"algorithm.kl.where={config.algorithm.kl.where} with algorithm.name=distill: no reward is learnt from"
    for kind, own in OWN_ADVANTAGES.items():
        if advantage == own and name not in OWN_ADVANTAGES:
            yield f"algorithm.advantage={own} needs algorithm.name={kind} (algorithm={kind} sets both), not {name}"


def _critic(config: Config, spec: Model | None) -> Iterator[str]:
    critic, trainer = config.critic, config.trainer
    if critic.warmup_steps >= trainer.steps:
        yield (
            f"critic.warmup_steps={critic.warmup_steps} is no less than trainer.steps={trainer.steps}: the policy "
            "would never be updated"
        )
    if critic.min_lr > critic.lr:
        yield f"critic.min_lr={critic.min_lr} is more than critic.lr={critic.lr}"
    elif critic.min_lr and config.optimizer.schedule == "constant":
        yield f"critic.min_lr={critic.min_lr} has no effect with optimizer.schedule=constant"
    own = critic_config(config)
    if own.parallel != config.parallel:
        found = chain(rank_problems(own, None, None, spec), model_problems(own, spec) if spec is not None else ())
        yield from (f"the critic's layout (critic.parallel, where null parallel): {text}" for text in found)


def _preference(config: Config) -> Iterator[str]:
    preference, default = config.preference, PreferenceConfig()
    for loss, keys in _OWN.items():
        for key in keys:
            value = getattr(preference, key)
            if value != getattr(default, key) and preference.loss != loss:
                yield f"preference.{key}={value} has no effect with preference.loss={preference.loss}; only with {loss}"
    if preference.loss == "cdpo" and preference.label_smoothing == 0:
        yield "preference.label_smoothing=0 with preference.loss=cdpo: that is dpo; set the share of wrong labels"
    if preference.loss == "simpo":
        if not preference.length_normalized:
            yield "preference.length_normalized=false with preference.loss=simpo: its reward is a mean; set true"
        if preference.reference != "precomputed":
            yield f"preference.reference={preference.reference} has no effect with preference.loss=simpo: it has none"
    if preference.loss == "kto" and not (preference.desirable_weight and preference.undesirable_weight):
        yield "preference.desirable_weight or undesirable_weight is 0: half of the data would teach nothing"
