"""Advantages that differ from token to token: from a critic's values, or from a teacher's log-probs."""

from collections.abc import Sequence

import torch

from hybridrl.algorithms.distillation import reverse_kl
from hybridrl.algorithms.gae import gae
from hybridrl.algorithms.kl import token_rewards
from hybridrl.algorithms.value_losses import explained_variance
from hybridrl.config.schema import Config, CriticConfig
from hybridrl.rollout.samples import Group
from hybridrl.training.estimate import Shaped, finish, shape, with_advantages
from hybridrl.training.rows import Row


def credit(
    rows: Sequence[Row], groups: Sequence[Group], config: Config, *, kl_coef: float = 0.0
) -> tuple[list[Row], dict[str, float]]:
    """The rows with `advantages` on their trained tokens, and metrics, as `algorithm.name` has them estimated.

    Arguments and metrics are those of `hybridrl.training.estimate.with_advantages`, which makes those of groups.
    `ppo` needs `values` and adds `returns`, with the metrics `value/mean`, `value/explained_variance` and
    `return/mean`. `distill` needs `teacher_log_probs`; its metric is `kl/teacher`, the mean over tokens of the policy's
    log-prob minus the teacher's, and rewards, where there are judges, are not learnt from.
    """
    algorithm = config.algorithm
    if algorithm.name == "ppo":
        return _with_values(shape(rows, groups, algorithm, kl_coef), config, kl_coef)
    if algorithm.name == "distill":
        return _with_teacher(shape(rows, groups, algorithm, kl_coef), config)
    return with_advantages(rows, groups, algorithm, kl_coef=kl_coef)


def _with_values(shaped: Shaped, config: Config, kl_coef: float) -> tuple[list[Row], dict[str, float]]:
    trained, critic = shaped.trained, config.critic
    advantages, returns = values_and_rewards(shaped, critic, kl_coef if config.algorithm.kl.where == "reward" else 0.0)
    values = trained.values("values")
    some = len(values) > 0
    metrics = {
        "value/mean": float(values.mean()) if some else 0.0,
        "value/explained_variance": float(explained_variance(values, returns)) if some else float("nan"),
        "return/mean": float(returns.mean()) if some else 0.0,
    }
    rows, found = finish(shaped, advantages, config.algorithm, returns=returns)
    return rows, found | metrics


def values_and_rewards(shaped: Shaped, critic: CriticConfig, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [t] float64 by trained token.

    A token's reward is -kl_coef times its divergence, and the last one's the response's reward beside.
    """
    trained = shaped.trained
    mask = trained.padded_mask
    kl = torch.zeros(len(trained.segments.ids), dtype=torch.float64) if shaped.kl is None else shaped.kl
    rewards = token_rewards(shaped.rewards, trained.pad(kl), mask, kl_coef)
    values = trained.pad(trained.values("values"))
    advantages, returns = gae(rewards, values, mask, gamma=critic.gamma, lam=critic.lam)
    return advantages[mask].double(), returns[mask].double()


def _with_teacher(shaped: Shaped, config: Config) -> tuple[list[Row], dict[str, float]]:
    trained = shaped.trained
    policy, teacher = trained.values("old_log_probs"), trained.values("teacher_log_probs")
    mask = trained.padded_mask
    advantages = reverse_kl(trained.pad(policy), trained.pad(teacher), mask, discount=config.teacher.discount)
    divergence = float((policy - teacher).mean()) if len(policy) else 0.0
    rows, found = finish(shaped, advantages[mask].double(), config.algorithm)
    return rows, found | {"kl/teacher": divergence}
