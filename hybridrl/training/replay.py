"""Routed experts between rows and routers: which token each rank's router sees at which place, both ways.

A router's tokens are those of a micro-batch, sequence first, cut by context parallelism and then by sequence
parallelism. Their places among all rows are known before the pass; everything else is looking up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.megatron.build import unwrap
from hybridrl.models.megatron.context import Share
from hybridrl.models.megatron.replay import FREE, replaying
from hybridrl.models.megatron.router import routers
from hybridrl.models.spec import MoeSpec
from hybridrl.parallel.groups import Groups
from hybridrl.rollout.routes import Routes, dtype_for
from hybridrl.training.microbatch import MicroBatch
from hybridrl.training.rows import Row

NOWHERE = -1
"""The place of padding."""


class Routed:
    """One pass over rows in which routers are given their choices, or keep them, or both.

    Args:
        chunks: this rank's part of the model.
        rows: all of the pass; where they have routes, these are taken.
        keep: whether `collect` will be asked for what was chosen.
        backward: whether gradients are computed.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        rows: Sequence[Row],
        moe: MoeSpec,
        groups: Groups,
        *,
        keep: bool,
        backward: bool,
    ) -> None:
        config = unwrap(chunks[0]).config
        self._chunks, self._moe, self._groups = list(chunks), moe, groups
        self._starts = [0, *accumulate(len(row) for row in rows)]
        self._routes = routes_of(rows)
        self._parts = groups.sizes.tp if config.sequence_parallel else 1
        self._keep = keep
        self._recomputed = backward and config.recompute_granularity == "full"
        self._seen: list[Tensor] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """The time of the pass."""
        with replaying(routers(self._chunks), keep=self._keep, recomputed=self._recomputed):
            yield

    def prepare(self, chunk: torch.nn.Module, batch: MicroBatch, share: Share | None) -> None:
        """Before `chunk` runs a micro-batch, of which this context-parallel rank computes a share, or all."""
        places = self._places(batch, share)
        if self._keep and chunk is self._chunks[0]:
            self._seen.append(places)
        if self._routes is None:
            return
        at = places.cpu().numpy()
        for router in routers([chunk]):
            assert router.replay is not None
            chosen = self._routes[at, router.layer_number - 1].astype(np.int64)
            chosen[at == NOWHERE] = FREE
            router.replay.give(torch.from_numpy(chosen).to(places.device), places != NOWHERE)

    def _places(self, batch: MicroBatch, share: Share | None) -> Tensor:
        """int64 [tokens]: of each token of a micro-batch, in a router's order here, its place among all rows end to
        end, or `NOWHERE` for padding."""
        whole = np.full(tuple(batch.tokens.shape), NOWHERE, np.int64)
        for row, (b, s), length in zip(batch.rows, batch.starts, batch.row_lengths, strict=True):
            whole[b, s : s + length] = np.arange(self._starts[row], self._starts[row] + length)
        places = torch.from_numpy(whole).to(batch.tokens.device)
        own = (places if share is None else share.cut(places)).t()
        return own.chunk(self._parts)[self._groups.coordinates.tp if self._parts > 1 else 0].flatten()

    def collect(self) -> list[Routes]:
        """What all routers of the world chose, by row: [length, layers, k], alike on all ranks; `FREE` in dense layers.

        Collective. Bytes are exchanged a layer at a time, one for each id where experts are few.
        """
        speaks = self._parts > 1 or self._groups.coordinates.tp == 0  # other ranks hold the same
        own = {router.layer_number - 1: router for router in routers(self._chunks)}
        device = next(self._chunks[0].parameters()).device
        tokens, moe = self._starts[-1], self._moe
        routes: Routes = np.full((tokens, len(moe.layers), moe.top_k), FREE, dtype_for(moe.num_experts))
        kind = torch.uint8 if moe.num_experts < 255 else torch.int32
        for layer in np.flatnonzero(moe.layers).tolist():
            found = torch.zeros(tokens, moe.top_k, dtype=kind, device=device)
            if speaks and layer in own and (replay := own[layer].replay) is not None:
                for places, chosen in zip(self._seen, replay.chosen, strict=True):
                    real = places != NOWHERE
                    found[places[real]] = (chosen[real] + 1).to(kind)
            dist.all_reduce(found)
            routes[:, layer] = found.cpu().numpy().astype(np.int64) - 1
        return [routes[a:b] for a, b in pairwise(self._starts)]

    def metrics(self) -> dict[str, float]:
        """`routing/replayed`: share of (token, layer) pairs whose experts were given; `routing/changed`: share of those
        that would have taken others. Empty where none were given. Collective."""
        if self._routes is None:
            return {}
        found = [router.replay for router in routers(self._chunks) if router.replay is not None]
        device = next(self._chunks[0].parameters()).device
        counts = torch.zeros(3, dtype=torch.float64, device=device)
        for replay in found:
            counts += torch.stack([torch.as_tensor(n, device=device).double() for n in replay.counts])
        dist.all_reduce(counts)
        tokens, replayed, changed = counts.tolist()
        return {"routing/replayed": replayed / max(tokens, 1), "routing/changed": changed / max(replayed, 1)}


def routes_of(rows: Sequence[Row]) -> Routes | None:
    """The routed experts of all rows end to end, [tokens, layers, k]; None where no row has any.

    Raises ValueError naming the rows that have none where others have.
    """
    lacking = [row.index for row in rows if row.routes is None]
    if len(lacking) == len(rows):
        return None
    if lacking:
        raise ValueError(f"rows {lacking[:8]} have no routed experts, others have: replay needs them of all")
    whole: Routes = np.concatenate([row.routes for row in rows if row.routes is not None])
    return whole
