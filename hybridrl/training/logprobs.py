"""Log-probs and entropy of tokens from logits whose vocabulary is sharded over tensor-parallel ranks.

The logits come as the model leaves them: [tokens, vocabulary / TP], in the model's dtype, padded vocabulary included.
The arithmetic is float32, a chunk of tokens at a time, in the forward and again in the backward pass, so [tokens,
vocabulary] never exists whole in float32. Ranks exchange four numbers a token, once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """This rank's share of the vocabulary."""

    size: int
    """Entries of the whole vocabulary that are real; the rest is padding and has probability 0."""
    rank: int = 0
    ranks: int = 1
    group: "dist.ProcessGroup | None" = None
    """The tensor-parallel group; None for a single rank."""

    def span(self, columns: int) -> tuple[int, int]:
        """First global id of this rank's `columns`, and how many of them are real."""
        start = self.rank * columns
        return start, min(max(self.size - start, 0), columns)


def token_log_probs(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and entropies, under softmax(logits / temperature).

    Args:
        logits: [t, vocabulary / TP], float32, bfloat16 or float16.
        targets: [t] int64, global ids inside the real vocabulary (rows are checked once, not every micro-batch).
        temperature: above 0; the same as the rollout's wherever the two are compared.
        chunk: tokens at a time.

    Returns log-probs [t] and entropies [t] in nats, float32, alike on all ranks and both differentiable. A rank's
    gradient is that of its own shard of the logits, also where the target lies on another rank.
    """
    if temperature <= 0:
        raise ValueError(f"rollout.temperature={temperature} must be above 0 for training")
    log_probs, entropy = _TokenLogProbs.apply(logits, targets, vocabulary, temperature, chunk)
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    """With x = logits / T, z = log Σ exp x, p = exp(x - z), H = -Σ p log p:

    d log p(target) / dx = onehot(target) - p      dH / dx = -p·(log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        start, real = vocabulary.span(logits.shape[-1])
        stats = logits.new_empty((4, len(logits)), dtype=torch.float32)
        for first in range(0, len(logits), chunk):
            part = slice(first, first + chunk)
            stats[:, part] = _local_stats(logits[part, :real], targets[part] - start, temperature)
        log_z, entropy, target = _combine(_gather(stats, vocabulary))
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.span, ctx.temperature, ctx.chunk = (start, real), temperature, chunk
        ctx.set_materialize_grads(False)
        return target - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        by_log_prob, by_entropy = grads
        logits, targets, log_z, entropy = ctx.saved_tensors
        start, real = ctx.span
        gradient = torch.zeros_like(logits)
        for first in range(0, len(logits), ctx.chunk):
            part = slice(first, first + ctx.chunk)
            log_p = logits[part, :real].float() / ctx.temperature - log_z[part, None]
            p = log_p.exp()
            out = torch.zeros_like(p)
            if by_entropy is not None:
                out -= by_entropy[part, None] * p * (log_p + entropy[part, None])
            if by_log_prob is not None:
                out -= by_log_prob[part, None] * p
                here, column = _owned(targets[part] - start, real)
                out[here, column] += by_log_prob[part][here]
            gradient[part, :real] = out / ctx.temperature
        return gradient, None, None, None, None


def _owned(local: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """Rows whose target is in this shard, and its column there."""
    here = ((local >= 0) & (local < real)).nonzero().flatten()
    return here, local[here]


def _local_stats(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """[4, t] of one shard: max m, S = Σ exp(x - m), U = Σ exp(x - m)·(x - m), and x of the target (0 if elsewhere)."""
    if logits.shape[-1] == 0:
        return torch.tensor([-torch.inf, 0, 0, 0], device=logits.device)[:, None].expand(4, len(logits))
    x = logits.float() / temperature
    top = x.amax(-1)
    target = torch.zeros_like(top)
    here, column = _owned(local, logits.shape[-1])
    target[here] = x[here, column]
    x -= top[:, None]
    weight = x.exp()
    return torch.stack([top, weight.sum(-1), (weight * x).sum(-1), target])


def _gather(stats: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[ranks, 4, t]"""
    if vocabulary.group is None or vocabulary.ranks == 1:
        return stats[None]
    parts = [torch.empty_like(stats) for _ in range(vocabulary.ranks)]
    dist.all_gather(parts, stats, group=vocabulary.group)
    return torch.stack(parts)


def _combine(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shards' statistics → log Σ exp x, entropy, and x of the target, [t] each.

    With M the largest m: S' = Σ exp(m - M)·S and U' = Σ exp(m - M)·(U + (m - M)·S) give z = M + log S' and
    H = log S' - U'/S', both without cancellation of large numbers.
    """
    m, s, u, target = stats.unbind(1)
    top = m.amax(0)
    shift = torch.where(s > 0, m - top, 0)  # a shard of padding alone has m = -inf
    scale = torch.where(s > 0, shift.exp(), 0)
    total = (scale * s).sum(0)
    moment = (scale * (u + shift * s)).sum(0)
    log_total = total.log()
    return top + log_total, log_total - moment / total, target.sum(0)
