"""Which replica answers which request: the one that holds most of its prefix, as long as none is overloaded. Pure.

A replica's KV cache keeps prefixes that it computed. Samples of one prompt share all of it, and the next turn of a
conversation begins with everything before it, so both go where that lies. Every rank has the same requests and sees the
same samples, so every rank computes the same routes, without a word between them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridrl.rollout.samples import Request, Sample

BLOCK = 16
"""Prefixes are compared in whole blocks of so many tokens."""


@dataclass
class Router:
    """Routes requests to `num_replicas` replicas and remembers what each one computed since the last `forget`.

    `max_imbalance` bounds the load of a replica that is chosen for its prefix: at most `1 + max_imbalance` times the
    mean, where a request costs its prompt's unheld tokens and its longest response. Above it the least loaded replica
    is taken, as it is where no replica holds anything. Raises ValueError for sizes that make no sense.
    """

    num_replicas: int
    max_imbalance: float = 0.25

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas={self.num_replicas} must be at least 1")
        if not self.max_imbalance >= 0:
            raise ValueError(f"max_imbalance={self.max_imbalance} must be at least 0")
        self._held: list[set[int]] = [set() for _ in range(self.num_replicas)]

    def assign(self, requests: Sequence[Request]) -> list[list[int]]:
        """For each replica, ascending, the indices of the requests that it answers; each request once.

        Requests of one prompt stay together. Prompts go, the costliest first, to their replica.
        """
        groups: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request.prompt.id, []).append(i)
        prefixes = {group: _blocks(requests[members[0]].prompt.token_ids) for group, members in groups.items()}
        costs = {group: sum(_cost(requests[i]) for i in members) for group, members in groups.items()}
        limit = (1 + self.max_imbalance) * sum(costs.values()) / self.num_replicas
        load = [0] * self.num_replicas
        shares: list[list[int]] = [[] for _ in range(self.num_replicas)]
        for group in sorted(groups, key=lambda g: -costs[g]):
            replica = self._choose(prefixes[group], costs[group], load, limit)
            shares[replica] += groups[group]
            load[replica] += costs[group]
            self._held[replica].update(prefixes[group])
        return [sorted(share) for share in shares]

    def observe(self, samples: Iterable[Sample], replica: int) -> None:
        """Takes note of responses that a replica has computed, for the turns that follow them."""
        for sample in samples:
            self._held[replica].update(_blocks((*sample.prompt.token_ids, *sample.response_ids)))

    def forget(self) -> None:
        """Nothing is held any more: the weights have changed, or the caches were flushed."""
        for held in self._held:
            held.clear()

    def _choose(self, prefix: Sequence[int], cost: int, load: Sequence[int], limit: float) -> int:
        held = [self._held_tokens(replica, prefix) for replica in range(self.num_replicas)]
        least = load.index(min(load))
        best = max(range(self.num_replicas), key=lambda r: (held[r], -load[r], -r))
        return best if held[best] > held[least] and load[best] + cost <= limit else least

    def _held_tokens(self, replica: int, prefix: Sequence[int]) -> int:
        blocks = 0
        for block in prefix:
            if block not in self._held[replica]:
                break
            blocks += 1
        return blocks * BLOCK


def _blocks(tokens: Sequence[int]) -> list[int]:
    """One number for each whole block of a sequence, which stands for the sequence up to its end."""
    found, before = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        # hashes of tuples of integers do not depend on the process
        before = hash((before, *tokens[start : start + BLOCK]))
        found.append(before)
    return found


def _cost(request: Request) -> int:
    return len(request.prompt.token_ids) + max(request.params.max_new_tokens, 0)
