"""The models of one run beside the engine's: those that its algorithm trains, and those that only score."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.compose import ConfigError
from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config, JudgeConfig
from hybridrl.config.validate.algorithm import updates_a_step
from hybridrl.inputs import other_model
from hybridrl.models.families import with_scalar_head
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.rewards.reward_model import RewardModels, split_judges
from hybridrl.training.actor import Actor
from hybridrl.training.critic import Critic, RewardModel, make_critic
from hybridrl.training.frozen import FrozenPolicy


@dataclass(kw_only=True)
class RunModels:
    """Each where the run has it. Either the actor or the reward model is what the run is for."""

    actor: Actor | None = None
    reward_model: RewardModel | None = None
    """That is trained."""
    critic: Critic | None = None
    teacher: FrozenPolicy | None = None
    judges: RewardModels | None = None
    """Reward models that judge samples."""


def make_models(config: Config, spec: ModelSpec, sizes: ParallelSizes, *, folder: Path, updates: int) -> RunModels:
    """Makes them on this rank's device. Collective.

    Args:
        spec, folder: of the model that the run starts from.
        sizes: the training world, whose groups are in force.
        updates: optimizer updates of the policy, or of the reward model.

    Raises ConfigError for another model's folder that cannot be read or does not fit the policy.
    """
    kind = config.algorithm.name
    options: Any = {"folder": folder, "total_updates": updates}
    if kind == "reward_model":
        return RunModels(reward_model=RewardModel(config, with_scalar_head(spec), sizes, **options))
    made = RunModels(actor=Actor(config, spec, sizes, **options))
    if kind == "ppo":
        path, found = other_model("critic.path", config.critic.path, folder, spec)
        steps = config.trainer.steps * updates_a_step(config)
        made.critic = make_critic(config, with_scalar_head(found), sizes, folder=path, total_updates=steps)
    rules, models = split_judges(config.rewards.judges)
    if models and not is_supervised(config):
        folders = [_reward_folder(judge, folder, spec) for judge in models]
        made.judges = RewardModels(models, folders, config, sizes, rules)
    if kind == "distill":
        path, found = other_model("teacher.path", config.teacher.path, folder, spec)
        made.teacher = FrozenPolicy(config, found, sizes, folder=path)
    return made


def _reward_folder(judge: JudgeConfig, policy_folder: Path, policy: ModelSpec) -> tuple[Path, ModelSpec]:
    """Folder and sizes of a reward model that judges. Raises ConfigError for one that cannot."""
    key, path = "rewards.judges.args.path", judge.args["path"]
    folder, spec = other_model(key, path, policy_folder, policy)
    if not spec.scalar_head:
        raise ConfigError([f"{key}={path}: a language model; expected a reward model (ForSequenceClassification)"])
    return folder, spec
