"""Generalized advantage estimation over the tokens that the policy chose itself."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages A and returns A + V of each of the policy's own tokens.

    Source: Schulman et al. 2016, eqs. 11 to 16: with t and t' an own token and the next one,

        δ_t = r_t + γ·V_t' - V_t        A_t = δ_t + γλ·A_t'

    and V = A = 0 after the last one. Tokens between t and t' (a tool's output, a user's turn) take no step of γ or λ:
    they are part of the state that t' is chosen in. A reward on one of them belongs to the own token before it.

    Args:
        rewards: [n, t] by token. On tokens before the first own one they are lost: nothing was chosen yet.
        values: [n, t]: V of the state that a token is chosen in. Outside the mask they may hold anything.
        mask: [n, t] bool: own tokens.
        gamma, lam: in [0, 1].

    Returns advantages and returns, [n, t] float32, 0 outside the mask. The recursion is float64.
    """
    own, zero = values.where(mask, 0).double(), values.new_zeros(len(values), dtype=torch.float64)
    reward = torch.where(torch.isfinite(rewards) | mask, rewards, 0).double()
    advantages = torch.zeros_like(own)
    next_value, next_advantage, pending = zero, zero, zero
    for t in reversed(range(mask.shape[1])):
        here, pending = mask[:, t], pending + reward[:, t]
        advantage = pending + gamma * next_value - own[:, t] + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0)
        next_value = torch.where(here, own[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
        pending = torch.where(here, 0, pending)
    return advantages.float(), (advantages + own).float()
