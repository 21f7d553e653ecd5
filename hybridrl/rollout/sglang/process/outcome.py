"""What is told of a request, beside SGLang's own words."""

from dataclasses import dataclass

STOP_STRINGS = "hybridrl_stop"
"""Where a request's sampling parameters, in `custom_params`, have its stop strings: SGLang itself heeds none."""


@dataclass(frozen=True)
class Outcome:
    """How one request ended: tokens, their log-probs and versions (as they were published), and why."""

    tokens: list[int]
    log_probs: list[float]
    spans: list[tuple[str, int, int]]
    """Weight version, first token and the token after the last."""
    finish: str
    """`stop`, `length` or `abort`."""
    message: str
    cached_tokens: int
    routed_experts: str | None
    """Base64 of int32 [tokens, layers, top-k]."""
