"""Requests to the replicas of an engine and their samples back, each request where its prefix lies."""

from collections.abc import Sequence

import torch.distributed as dist

from hybridrl.rollout.collect import check_samples, share
from hybridrl.rollout.engine import Engine
from hybridrl.rollout.routing import Router
from hybridrl.rollout.samples import Request, Sample
from hybridrl.rollout.stops import Decode


class Replicas:
    """All replicas of an engine, as one of their ranks sees them.

    Routes do not change what is drawn: each request has a seed of its own, and samples come in the order of requests.

    - `max_imbalance`: see `Router`;
    - `decode`: text of tokens, to check where responses with stop strings end.
    """

    def __init__(self, engine: Engine, *, max_imbalance: float = 0.25, decode: Decode | None = None) -> None:
        self._engine = engine
        self._router = Router(engine.num_replicas, max_imbalance)
        self._decode = decode
        self._version: int | None = None
        self._shares: list[list[int]] = []
        self._counted = (0, 0)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """This replica's samples, in the order of its share of the requests; empty if it has none.

        Every rank has the same requests, and asks in the same order. Raises ValueError that lists every sample that
        does not answer its request.
        """
        if self._engine.version != self._version or not self._engine.cache_bytes:
            self._router.forget()  # new weights flush the caches, and an engine without one keeps nothing
            self._version = self._engine.version
        self._shares = self._router.assign(requests)
        mine = [requests[i] for i in self._shares[self._engine.replica]]
        samples = self._engine.generate(mine)  # without any, too: replicas may step together
        check_samples(mine, samples, self._decode)
        return samples

    def share(
        self, local: Sequence[Sample], requests: Sequence[Request], group: dist.ProcessGroup | None = None
    ) -> list[Sample]:
        """All samples of the last `generate`, judged or not, on every rank alike; see `collect.share`."""
        samples = share(local, requests, replica=self._engine.replica, shares=self._shares, group=group)
        for replica, indices in enumerate(self._shares if self._engine.cache_bytes else ()):
            self._router.observe([samples[i] for i in indices], replica)
        return samples

    def take_counts(self) -> dict[str, float]:
        """Prompt tokens that this replica has served since the last call, `tokens/prompt`, and those of them whose KV
        it had already, `tokens/prompt_cached`."""
        before, self._counted = self._counted, (self._engine.prompt_tokens, self._engine.cached_tokens)
        return {
            "tokens/prompt": float(self._counted[0] - before[0]),
            "tokens/prompt_cached": float(self._counted[1] - before[1]),
        }
