"""On-policy distillation: what a teacher's log-probs of the policy's own samples say of each token."""

import torch
from torch import Tensor


def reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, *, discount: float = 0.0) -> Tensor:
    """Advantages [n, t] float32: A_t = d_t + discount·A_t', d = teacher's log-prob minus the policy's.

    Sources: MiniLLM (Gu et al. 2024), eq. 3, whose rewards to go are those of discount 1; GKD (Agarwal et al. 2024),
    with samples of the policy and reverse KL, whose gradient through each token's own choice is that of discount 0. The
    expectation of -d over the policy's samples is KL(policy ‖ teacher).

    Args:
        log_probs, teacher_log_probs: [n, t] of the sampled tokens; masked entries may hold anything.
        mask: [n, t] bool: the policy's own tokens, by which the discount counts (t' is the next one).
        discount: in [0, 1].
    """
    gap = torch.where(mask, teacher_log_probs - log_probs, 0).double()
    advantages, later = torch.zeros_like(gap), gap.new_zeros(len(gap))
    for t in reversed(range(gap.shape[1])):
        later = torch.where(mask[:, t], gap[:, t] + discount * later, later)
        advantages[:, t] = torch.where(mask[:, t], later, 0)
    return advantages.float()
