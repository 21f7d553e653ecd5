"""Which experts a token takes and how much of each: functions of the router's logits, for every family. Torch alone.

Softmax: the k largest logits, weighted by the softmax over all experts, renormalised over the chosen where the model
says so. Sigmoid (DeepSeek-V3, section 2.1.2): the k largest of score + bias, within the best groups of experts where
there are groups, weighted by the scores without the bias.
"""

import torch
from torch import Tensor

from hybridrl.models.spec import MoeSpec

_EPSILON = 1e-20
GROUP_MEMBERS = 2
"""A group of experts is as good as its best two (DeepSeek-V3's reference code)."""


def choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> Tensor:
    """The experts of each token: logits `[tokens, experts]` → int64 `[tokens, k]`. Ties go as `torch.topk` has them."""
    if moe.score_function == "softmax":
        return logits.topk(moe.top_k, dim=-1).indices
    scores = logits.sigmoid() if bias is None else logits.sigmoid() + bias
    if moe.num_groups > 1:
        scores = scores.masked_fill(~_allowed(scores, moe), float("-inf"))
    return scores.topk(moe.top_k, dim=-1).indices


def _allowed(scores: Tensor, moe: MoeSpec) -> Tensor:
    """bool `[tokens, experts]`: whether the expert is in one of its token's best groups."""
    groups = scores.unflatten(-1, (moe.num_groups, -1))
    best = groups.topk(GROUP_MEMBERS, dim=-1).values.sum(-1).topk(moe.topk_groups, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return kept.repeat_interleave(groups.shape[-1], dim=-1)


def weigh(logits: Tensor, chosen: Tensor, moe: MoeSpec) -> Tensor:
    """Weights of the chosen experts: `[tokens, experts]` and int64 `[tokens, k]` → `[tokens, k]`, differentiable."""
    if moe.score_function == "softmax" and moe.norm_topk_prob:
        # Softmax over the k chosen logits is softmax over all of them, renormalised over the chosen.
        weights = logits.gather(-1, chosen).softmax(-1)
    elif moe.score_function == "softmax":
        weights = logits.softmax(-1).gather(-1, chosen)
    else:
        weights = logits.sigmoid().gather(-1, chosen)
        if moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return weights * moe.routed_scaling_factor if moe.routed_scaling_factor != 1.0 else weights


def shares(logits: Tensor, moe: MoeSpec) -> Tensor:
    """What the load-balancing loss takes for probabilities: `[tokens, experts]`, each token's sum 1."""
    if moe.score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + _EPSILON)


def spread(values: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """`[tokens, k]` → `[tokens, experts]`, 0 where an expert was not chosen."""
    return values.new_zeros((len(values), experts)).scatter(1, chosen, values)


def as_map(chosen: Tensor, experts: int) -> Tensor:
    """int64 `[tokens, k]` → bool `[tokens, experts]`."""
    return torch.zeros((len(chosen), experts), dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
