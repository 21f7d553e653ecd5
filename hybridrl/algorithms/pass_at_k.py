"""Advantages for the best of k responses instead of the single one."""

from math import comb

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.groups import Groups


@ADVANTAGES.register("pass_at_k")
def pass_at_k(
    rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, *, pass_k: int, eps: float = 1e-6
) -> Tensor:
    """How much better the best of k is where a response is among the k: (E[max | i] - E[max]) / (deviation + eps).

    Source: Chen et al. 2025, "Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning
    Models", the analytical derivation: expectation and deviation are over all subsets of k of the group's n responses.
    The paper has rewards of 0 and 1, for which this gives its formulas; the maximum extends them to any reward. With
    k = 1 it is `grpo` with `population_std`.

    Takes and returns what the estimators of `hybridrl.algorithms.advantages` do. A group with fewer than k valid
    responses has no such subset and gets 0. Raises ValueError for k below 1.
    """
    if pass_k < 1:
        raise ValueError(f"algorithm.pass_k={pass_k} must be at least 1")
    groups = Groups(rewards, group_ids, valid)
    advantages = torch.zeros_like(groups.rewards)
    for group in groups.differ().nonzero().flatten().tolist():
        members = ((groups.index == group) & groups.valid).nonzero().flatten()
        if len(members) >= pass_k:
            advantages[members] = _of_group(groups.rewards[members], pass_k, eps)
    return advantages.float()


def _of_group(rewards: Tensor, k: int, eps: float) -> Tensor:
    """[n] float64. In ascending order, response j (from 0) is the best of C(j, k - 1) subsets; among the subsets that
    hold i, j > i is the best of C(j - 1, k - 2), and i itself of C(i, k - 1)."""
    n = len(rewards)
    ordered, order = rewards.sort(stable=True)
    best = _shares([comb(j, k - 1) for j in range(n)], comb(n, k), rewards)
    mean = (best * ordered).sum()
    deviation = (best * (ordered - mean).square()).sum().sqrt()
    own = _shares([comb(i, k - 1) for i in range(n)], comb(n - 1, k - 1), rewards)
    others = _shares([comb(j - 1, k - 2) if k > 1 and j else 0 for j in range(n)], comb(n - 1, k - 1), rewards)
    contributed = others * ordered
    above = contributed.flip(0).cumsum(0).flip(0) - contributed
    given = own * ordered + above
    return torch.empty_like(rewards).scatter(0, order, (given - mean) / (deviation + eps))


def _shares(counts: list[int], total: int, like: Tensor) -> Tensor:
    return torch.tensor([count / total for count in counts], dtype=torch.float64, device=like.device)
