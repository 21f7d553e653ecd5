"""What one request has produced so far, kept by us rather than read back from SGLang.

So nothing is lost where SGLang keeps nothing (a request that is aborted in the queue, or after it was retracted), and
every token carries the log-prob and the weight version that it was sampled with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridrl.models.spec import MoeSpec
from hybridrl.rollout.routes import pack
from hybridrl.rollout.samples import Finish, Request, Sample, SamplingParams
from hybridrl.rollout.seeds import UniformStream
from hybridrl.rollout.stops import Decode, Ending


@dataclass
class Trace:
    """A request in the engine: its tokens, their log-probs and versions, and its source of uniform numbers."""

    request: Request
    max_new_tokens: int
    """The request's own limit, or what the context leaves."""
    decode: Decode | None = None
    """For stop strings."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache when the request was first admitted."""
    retractions: int = 0
    routes: list[NDArray[np.integer]] = field(default_factory=list)
    """[tokens, layers, top-k] of the passes so far, of an engine that records them."""
    routed_tokens: int = 0
    """Rows in `routes`."""

    def __post_init__(self) -> None:
        self._uniforms = UniformStream(self.request.seed)
        self._ending = Ending(self.params, self.max_new_tokens, self.decode)
        self._foreseen: tuple[int, Finish | None] | None = None

    @property
    def params(self) -> SamplingParams:
        """The request's own."""
        return self.request.params

    @property
    def uniform(self) -> float:
        """The number that decides the next token: by the request's seed and the token's index alone."""
        return self._uniforms[len(self.tokens)]

    def foresee(self, token: int) -> Finish | None:
        """Why the response ends with this token, the next one that `append` takes; None if it goes on."""
        self._foreseen = token, self._ending.append(token)
        return self._foreseen[1]

    def append(self, token: int, log_prob: float, version: int) -> None:
        """Takes a sampled token, and ends the request where it stops or fills its limit.

        Raises ValueError for another token than the one that was foreseen.
        """
        if self._foreseen is None:
            self.foresee(token)
        assert self._foreseen is not None
        if self._foreseen[0] != token:
            raise ValueError(f"token {token} came where {self._foreseen[0]} was foreseen")
        self.finish, self._foreseen = self._foreseen[1], None
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    def add_routes(self, rows: NDArray[np.integer]) -> None:
        """Takes the experts of further tokens, [tokens, layers, top-k]."""
        if len(rows):
            self.routes.append(rows)
            self.routed_tokens += len(rows)

    def sample(self, moe: MoeSpec | None = None) -> Sample:
        """The sample, of a request that has ended. `moe` is the model's. Raises ValueError otherwise."""
        if self.finish is None:
            raise ValueError(f"prompt {self.request.prompt.id}, sample {self.request.index} has not ended")
        return Sample(
            prompt=self.request.prompt,
            index=self.request.index,
            response_ids=self.tokens,
            log_probs=self.log_probs,
            versions=self.versions,
            finish=self.finish,
            routed_experts=pack(self.routes, moe) if moe is not None and self.routes else None,
        )


def problems(requests: Sequence[Request], *, kv_tokens: int, max_positions: int) -> list[str]:
    """Requests that do not fit `kv_tokens`, the capacity of a replica's KV cache, each in words."""
    found = []
    for r in requests:
        wanted = len(r.prompt.token_ids) + budget(r, max_positions)
        if wanted > kv_tokens:
            found.append(
                f"prompt {r.prompt.id}, sample {r.index}: {len(r.prompt.token_ids)} prompt tokens and "
                f"{budget(r, max_positions)} response tokens do not fit the KV cache of {kv_tokens} tokens; raise "
                "rollout.sglang.kv_tokens"
            )
    return found


def budget(request: Request, max_positions: int) -> int:
    """Response tokens that a request may have: its own limit, within the model's context."""
    return max(0, min(request.params.max_new_tokens, max_positions - len(request.prompt.token_ids)))
