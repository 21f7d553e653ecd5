"""A router's choices, kept and made again: of one pass in another, and of a forward pass in its recomputation.

The weights of the chosen experts are computed from the logits of the pass that replays, so gradients reach the router
as they do without replay; the choice itself has none in either case (Rollout Routing Replay, Ma et al. 2025).
"""

from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridrl.models.megatron.router import Router

FREE = -1
"""In the place of a token's experts: the router chooses by itself."""


class Replay:
    """What one router is to choose, and what it chose, in the passes between `start` and `stop`."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None
        self.chosen: list[Tensor] = []
        """Of each micro-batch so far, where `keep` is set: int64 `[tokens, k]`."""
        self.keep = False
        self.counts: tuple[Tensor | int, ...] = (0, 0, 0)
        """Real tokens where experts were given, those whose experts were, and those that would have taken others."""
        self._recomputed = False
        self._pending: deque[Tensor] = deque()

    def start(self, *, keep: bool, recomputed: bool) -> None:
        """Begins a pass. `recomputed` says that each forward call without gradients has one with gradients after it,
        for the same micro-batch, and these in the same order."""
        self.keep, self._recomputed = keep, recomputed
        self._given, self.counts = None, (0, 0, 0)
        self.chosen.clear()
        self._pending.clear()

    def stop(self) -> None:
        """Ends it. Raises RuntimeError where a forward call was not recomputed."""
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} micro-batches of a router were not recomputed")
        self._given = None

    def give(self, experts: Tensor, real: Tensor) -> None:
        """Of the micro-batch that comes next: int64 `[tokens, k]`, `FREE` in all of a row without a choice, and bool
        `[tokens]`, False at padding."""
        self._given = experts, real

    def settle(self, own: Tensor) -> Tensor:
        """The experts of each token, `[tokens, k]`, where the router itself would take `own`.

        Raises ValueError where as many tokens were not given, and RuntimeError for a recomputation of nothing.
        """
        if self._recomputed and torch.is_grad_enabled():
            if not self._pending:
                raise RuntimeError("a router is recomputed that has not run: replay fits model.recompute=full alone")
            return self._pending.popleft()
        chosen = own if self._given is None else self._replace(own, *self._given)
        if self.keep:
            self.chosen.append(chosen)
        if self._recomputed:
            self._pending.append(chosen)
        return chosen

    def _replace(self, own: Tensor, given: Tensor, real: Tensor) -> Tensor:
        if given.shape != own.shape:
            raise ValueError(
                f"experts of {list(given.shape)} tokens and choices were given, expected {list(own.shape)}"
            )
        known = given[:, :1] != FREE
        chosen = torch.where(known, given, own)
        other = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
        found = (real.sum(), known.sum(), other.sum())
        self.counts = tuple(before + more for before, more in zip(self.counts, found, strict=True))
        return chosen


@contextmanager
def replaying(routers: "Iterable[Router]", *, keep: bool, recomputed: bool) -> "Iterator[None]":
    """One pass in which these routers keep or are given their choices. What they kept and counted stays afterwards."""
    found = list(routers)
    for router in found:
        if router.replay is None:
            router.replay = Replay()
        router.replay.start(keep=keep, recomputed=recomputed)
    yield
    for router in found:
        assert router.replay is not None
        router.replay.stop()
