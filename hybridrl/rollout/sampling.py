"""The sampling distribution: temperature, top-k and top-p, log-probs under it, and draws from it. Pure functions.

The order is temperature, then top-k, then top-p over what top-k left, as in Hugging Face and vLLM. Rows may differ in
all three. Where logits are equal the lower token id goes first, so the kept set never depends on the sort.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.rollout.samples import SamplingParams

MASS_SLACK = 1e-6
"""Top-p compares masses of fp32 probabilities, which are off by as much; without it noise could keep one token more."""


@dataclass(frozen=True, eq=False)
class Filters:
    """Sampling parameters of a batch of rows: float64 and int64 tensors [rows]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "Filters":
        """Rows of these parameters, one each. Raises ValueError as `check` does."""
        check(params)
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        )


def check(params: Sequence[SamplingParams]) -> None:
    """Raises ValueError that lists every parameter out of its range, once."""
    found = set()
    for p in params:
        if not p.temperature >= 0:
            found.add(f"temperature={p.temperature} must be at least 0 (0 takes the likeliest token)")
        if p.top_k < 0:
            found.add(f"top_k={p.top_k} must be at least 0 (0 keeps all tokens)")
        if not 0 < p.top_p <= 1:
            found.add(f"top_p={p.top_p} must be in (0, 1]")
        if "" in p.stop:
            found.add(f"stop={p.stop} holds an empty string, which would end every response at its first token")
    if found:
        raise ValueError("; ".join(sorted(found)))


def log_probs(logits: Tensor, filters: Filters, vocab_limit: int | None = None) -> Tensor:
    """Log-probs of every token under the sampling distribution.

    `logits` is [rows, vocabulary], of any float dtype; the result is fp32 of the same shape, normalised over the kept
    tokens, -inf elsewhere. Tokens from `vocab_limit` on (padding of the vocabulary) are never kept. A temperature of 0
    is the limit: all mass on the likeliest token. Non-finite logits give NaN rows, for the caller to refuse.
    """
    logits = logits.float()
    if vocab_limit is not None and vocab_limit < logits.shape[-1]:
        logits = logits.clone()
        logits[:, vocab_limit:] = -torch.inf
    greedy = filters.temperature == 0
    scale = torch.where(greedy, 1.0, filters.temperature).float()
    scaled = logits / scale[:, None]
    limited = (filters.top_k > 0) | (filters.top_p < 1) | greedy
    if bool(limited.any()):
        rows = limited.nonzero()[:, 0]
        top_k = torch.where(greedy, 1, filters.top_k)[rows]
        scaled[rows] = _keep(scaled[rows], top_k, filters.top_p[rows])
    return scaled.log_softmax(-1)


def _keep(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [rows, vocabulary] with -inf at the tokens that top-k and then top-p drop."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    mass = ordered.softmax(-1).double()
    before = mass.cumsum(-1) - mass
    beyond = (before >= top_p[:, None] - MASS_SLACK) & (rank > 0) & (top_p[:, None] < 1)
    ordered = ordered.masked_fill(beyond, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, ordered)


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [rows] by inversion of the cumulative distribution, in the order of token ids.

    `log_probs` is [rows, vocabulary], `uniforms` float64 [rows] in [0, 1). Token i is drawn where
    F(i-1) <= u·F(last) < F(i); a token without mass is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    # u < 1, yet u·total may round up to total, which is past the last token
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
