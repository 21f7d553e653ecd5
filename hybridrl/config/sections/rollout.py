"""Generation and its engines."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class SGLangConfig:
    """The SGLang engine (`rollout.engine=sglang`)."""

    hosting: str = "in_process"
    """`in_process`: each rank hosts its rank of a replica; `subprocess`: SGLang's own processes, one set a replica."""
    max_running_requests: int = 64
    """Sequences that the `rollout.tp` ranks of a model decode together; `rollout.dp` replicas share them."""
    kv_tokens: int | None = None
    """Tokens of a replica's KV cache; None: what its share of `max_running_requests` of the longest requests needs."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by its own names."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Generation."""

    engine: str = "transformers"
    """`transformers` (embedded, any machine) or `sglang`."""
    tp: int = 1
    dp: int = 1
    ep: int = 1
    """Sizes of the engine: tensor parallelism, attention data parallelism within its ranks (SGLang's `dp_size`), and
    expert parallelism. Each `tp / dp` ranks are a replica, with requests and a KV cache of its own."""
    n: int = 8
    """Samples a prompt (the group size)."""
    temperature: float = 1.0
    """Of sampling, and of the log-probs of trainer and engine."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    max_prompt_length: int = 512
    """Tokens; see `data.overlong`."""
    max_response_length: int = 512
    """Tokens; a response cut there is marked truncated."""
    max_batch_size: int = 64
    """Sequences that the embedded engine decodes together."""
    max_imbalance: float = 0.25
    """Load of a replica that is chosen for the prefix it holds: at most so much over the mean, as a share of it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further ids that end a response, beside the model's EOS ids."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response once its text holds one; their tokens stay in the response."""
    routed_experts: bool = False
    """Have the engine return the experts that each token of an MoE model was routed to."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
