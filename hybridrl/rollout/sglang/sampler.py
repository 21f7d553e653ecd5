"""The sampler that SGLang is given: hybridrl's own distribution and draws, by each request's seed.

SGLang's samplers draw from the process's random state (so tensor-parallel ranks may differ) or, where deterministic
inference is on, by a hash that exists as a CUDA kernel only; and they return log-probs before top-p and top-k. This
one takes their place in the model runner and shares `hybridrl.rollout.sampling` with the embedded engine: both draw the
same tokens for the same seed, up to the rounding of the logits.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.rollout import sampling
from hybridrl.rollout.samples import SamplingParams
from hybridrl.rollout.sglang import internals as sg


class Row(Protocol):
    """What decides the next token of one request."""

    @property
    def params(self) -> SamplingParams:
        """Temperature, top-p and top-k."""

    @property
    def uniform(self) -> float:
        """The number in [0, 1) to draw by."""


class SeededSampler(sg.Sampler):
    """Draws row i of a batch by `rows[i]`, a list that the scheduler sets before every forward pass."""

    vocab_limit: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.rows: Sequence[Row] = ()
        self._log_probs: Tensor | None = None

    def forward(
        self, logits_output: sg.LogitsProcessorOutput, sampling_info: Any, return_logprob: bool, *_: Any, **__: Any
    ) -> Tensor:
        """Token ids [rows] from logits [rows, vocabulary]."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        if len(logits) != len(self.rows):
            raise RuntimeError(f"SGLang computed {len(logits)} rows of logits for a batch of {len(self.rows)} requests")
        tokens, self._log_probs = draw(logits, self.rows, self.vocab_limit)
        if return_logprob:
            logits_output.next_token_logprobs = self._log_probs
        return tokens

    def take_log_probs(self) -> list[float]:
        """The log-prob of each row's drawn token in the last forward pass. Raises RuntimeError if there was none."""
        if self._log_probs is None:
            raise RuntimeError("SGLang ran a batch without calling its sampler")
        taken, self._log_probs = self._log_probs.tolist(), None
        return list(taken)


def draw(logits: Tensor, rows: Sequence[Row], vocab_limit: int | None) -> tuple[Tensor, Tensor]:
    """Token ids int64 [rows] and their log-probs fp32 [rows], NaN where the logits of a row are not finite."""
    if all(row.params.temperature == 0 for row in rows):
        best, tokens = logits[:, :vocab_limit].float().max(-1)  # of equals the first, as in `sampling.log_probs`
        return tokens, best - best  # 0, or NaN
    filters = sampling.Filters.of([row.params for row in rows], logits.device)
    uniforms = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=logits.device)
    log_probs = sampling.log_probs(logits, filters, vocab_limit)
    tokens = sampling.draw(log_probs, uniforms).clamp(max=log_probs.shape[1] - 1)  # a row of NaN draws past its end
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]
