"""Advantages of whole responses, from their rewards and the group each belongs to.

All take rewards [n] float, group_ids [n] integer (responses with one id are a group, wherever they stand) and valid [n]
bool (the rest, whose judge failed, is outside all statistics and gets 0; None: all are valid), and return [n] float32.
Statistics are float64. A group whose valid rewards differ by no more than float32 can tell gives exactly 0 wherever the
group is the baseline. All raise ValueError for mismatched shapes or a valid reward that is not finite.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.registry import Registry

AdvantageEstimator: TypeAlias = Callable[..., Tensor]
"""Takes `rewards`, `group_ids`, `valid` [n] and those that it names of: `lengths` [n], the trained tokens of each
response; `baselines` [n], the reward of its prompt's greedy response; `normalize` and `pass_k`, the recipe's."""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")

NORMALIZATIONS = ("sample_std", "population_std", "batch_std", "none")


@ADVANTAGES.register("grpo")
def grpo(
    rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, normalize: str = "sample_std", eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages: (reward - mean of the group) / (deviation + eps).

    Source: DeepSeekMath (Shao et al. 2024), section 4.1.2; without the deviation, Dr. GRPO (Liu et al. 2025), section
    3.2; with the batch's deviation, Lite PPO (Liu et al. 2025, "Tricks or Traps?").

    Args:
        normalize: the deviation of the group's rewards, `sample_std` (over n - 1) or `population_std` (over n); of all
            valid rewards of the batch, `batch_std` (over n - 1); or `none`.

    Groups of one get exactly 0. Raises ValueError for an unknown `normalize`.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"algorithm.normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
    groups = Groups(rewards, group_ids, valid)
    centred = groups.centred(groups.means)
    if normalize == "none":
        return centred.float()
    if normalize == "batch_std":
        count = groups.valid.sum()
        mean = groups.rewards.sum() / count.clamp(min=1)
        square = torch.where(groups.valid, groups.rewards - mean, 0).square().sum()
        return (centred / ((square / (count - 1).clamp(min=1)).sqrt() + eps)).float()
    freedom = groups.counts - 1 if normalize == "sample_std" else groups.counts
    deviation = (groups.total(centred.square()) / freedom.clamp(min=1)).sqrt()
    return (centred / (deviation[groups.index] + eps)).float()


@ADVANTAGES.register("rloo")
def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Reward minus the mean reward of the group's other responses: n / (n - 1) · (reward - mean of the group).

    Source: REINFORCE leave-one-out, Ahmadian et al. 2024 ("Back to Basics"), section on RLOO; Kool et al. 2019.
    """
    groups = Groups(rewards, group_ids, valid)
    factor = groups.counts / (groups.counts - 1).clamp(min=1)
    return (groups.centred(groups.means) * factor[groups.index]).float()


@ADVANTAGES.register("reinforce")
def reinforce(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """The reward itself. With `algorithm.whiten` the batch is the baseline, as in REINFORCE++.

    Sources: Williams 1992; REINFORCE++ (Hu et al. 2025), whose advantages are normalised over the global batch.
    """
    return Groups(rewards, group_ids, valid).rewards.float()


@ADVANTAGES.register("remax")
def remax(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, baselines: Tensor) -> Tensor:
    """Reward minus the reward of the prompt's greedy response.

    Source: ReMax (Li et al. 2024), algorithm 1.

    Args:
        baselines: [n] float: the greedy response's reward; NaN where it has none (its judge failed), which gives 0.
    """
    known = torch.isfinite(baselines)
    valid = known if valid is None else valid & known
    groups = Groups(rewards, group_ids, valid)
    return torch.where(groups.valid, groups.rewards - baselines.double(), 0).float()


@ADVANTAGES.register("opo")
def opo(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, lengths: Tensor) -> Tensor:
    """Reward minus the group's mean weighted by length: of least variance where gradients grow with the length.

    Source: OPO (Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"), section 3: Σ length·reward / Σ length.

    Args:
        lengths: [n]: trained tokens of each response. A group without any has the baseline 0.
    """
    groups = Groups(rewards, group_ids, valid)
    weight = groups.total(lengths)
    baseline = groups.total(lengths * groups.rewards) / torch.where(weight > 0, weight, 1)
    return groups.centred(baseline).float()


@ADVANTAGES.register("gpg")
def gpg(
    rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, normalize: str = "none", eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages times α = B / (B - M), so that responses without signal do not shrink the gradient.

    Source: GPG (Chu et al. 2025, "Group Policy Gradient"): B valid responses, of which M are in groups whose rewards
    are all alike. Its F_norm is `normalize`, as in `grpo`; the paper takes 1 (`none`).
    """
    groups = Groups(rewards, group_ids, valid)
    total = groups.valid.sum()
    with_signal = (groups.valid & groups.differ()[groups.index]).sum()
    alpha = total / with_signal.clamp(min=1)
    return (alpha * grpo(rewards, group_ids, valid, normalize=normalize, eps=eps).double()).float()
