"""The engine's KV cache: what a token of it takes, and how many tokens and sequences it serves."""

from dataclasses import dataclass

from hybridrl.config.schema import Config
from hybridrl.models.weights import ITEM_BYTES
from hybridrl.planning.layouts import Layouts
from hybridrl.rollout.sglang.options import kv_token_bytes, kv_tokens


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """The cache of one replica."""

    token_bytes: int
    """Of one token on one rank."""
    wanted_tokens: int
    """As the configuration asks, for all sequences that run at once."""
    tokens: int
    """What the device has room for, at most `wanted_tokens`."""
    sequences: int
    """Longest sequences that run at once."""

    @property
    def nbytes(self) -> int:
        """On one rank."""
        return self.tokens * self.token_bytes


def wanted_sequences(config: Config, replicas: int) -> int:
    """Sequences of one replica that the configuration decodes together."""
    rollout, trainer = config.rollout, config.trainer
    share = -(-trainer.prompts_per_step * rollout.n // replicas)
    most = rollout.max_batch_size if rollout.engine == "transformers" else rollout.sglang.max_running_requests
    return max(1, min(share, most))


def kv_cache(config: Config, layouts: Layouts, free_bytes: int | None) -> KvCache:
    """The cache with `free_bytes` of a device for it; None for as much as is wanted."""
    rollout, sizes = config.rollout, layouts.engine_sizes
    longest = rollout.max_prompt_length + rollout.max_response_length
    one = kv_token_bytes(layouts.spec, sizes.attention_tp, ITEM_BYTES[config.model.dtype])
    together = wanted_sequences(config, layouts.world // sizes.tp)
    # With data-parallel attention each group of ranks caches its own sequences.
    per_rank = -(-together // sizes.dp)
    wanted = kv_tokens(config) if rollout.engine == "sglang" else per_rank * longest
    tokens = wanted if free_bytes is None else max(0, min(wanted, free_bytes // one))
    return KvCache(
        token_bytes=one, wanted_tokens=wanted, tokens=tokens, sequences=min(tokens // longest, per_rank) * sizes.dp
    )
