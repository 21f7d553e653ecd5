"""Who sends what to whom: same rank, else same node, else the least loaded replica.

The rule is a function of both layouts alone. Kinds are routed in order; the replicas that could serve a kind are
sorted by the bytes that earlier kinds already load them with, and its movements are dealt to them in turn. So every
rank knows every load without asking, and none knows only its own.

Where several ranks of a node need the same box and none of that node has it, each fetches a stripe of it over the
network, and they pass stripes on to each other within the node (`Flow.striped`): the box crosses the network once a
node instead of once a rank. No rank receives a byte twice either way.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES, Box
from hybridrl.reshard.boxes import stripe
from hybridrl.reshard.survey import Kind, Need

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Flow:
    """`receivers` get a box from `sources`, who are dealt out in turn.

    The `i`-th of `n` receivers gets the kind's `j`-th tensor from source `(j·n + i) mod len(sources)`.
    """

    sources: Ranks
    receivers: Ranks
    teams: tuple[tuple[int, ...], ...] = ()
    """Ranks of one node that share the box, each receiving its stripe; empty where each receives the whole box."""

    def source(self, ordinal: int, receiver: int) -> int:
        """Rank that sends to the `receiver`-th receiver, of the kind's `ordinal`-th tensor."""
        return int(self.sources[(ordinal * len(self.receivers) + receiver) % len(self.sources)])

    def receivers_of(self, ordinal: int, source: int) -> range:
        """Indices of the receivers that the `source`-th source serves, of the kind's `ordinal`-th tensor."""
        count = len(self.sources)
        return range((source - ordinal * len(self.receivers)) % count, len(self.receivers), count)

    def receiver_index(self, rank: int) -> int | None:
        """Where the rank stands among the receivers."""
        at = int(np.searchsorted(self.receivers, rank))
        return at if at < len(self.receivers) and self.receivers[at] == rank else None

    def source_index(self, rank: int) -> int | None:
        """Where the rank stands among the sources."""
        found = np.flatnonzero(self.sources == rank)
        return int(found[0]) if len(found) else None

    def team_of(self, rank: int) -> tuple[int, ...]:
        """The team that a receiver belongs to; empty where boxes are not striped."""
        return next((team for team in self.teams if rank in team), ())

    def parts(self, box: Box) -> list[Box | None]:
        """What each receiver gets from its source: the box, or its stripe of it (None for an empty one)."""
        if not self.teams:
            return [box] * len(self.receivers)
        stripes = {count: [stripe(box, count, i) for i in range(count)] for count in {len(team) for team in self.teams}}
        found = {rank: stripes[len(team)][i] for team in self.teams for i, rank in enumerate(team)}
        return [found[rank] for rank in self.receivers.tolist()]


@dataclass(frozen=True, slots=True)
class Route:
    """How one need of a kind is served."""

    need: Need
    ranks: frozenset[int]
    """Ranks that need the box or have it: all others have no part in the route."""
    local: frozenset[int]
    """Ranks that need the box and have it."""
    flows: tuple[Flow, ...]


class Routes:
    """The routes of all kinds, and the bytes between every two ranks, first hops and relays apart.

    Args:
        kinds: the survey.
        world: one more than the highest rank of either layout.
        ranks_per_node: ranks `n·ranks_per_node …` share node `n`; None for one node.
    """

    def __init__(self, kinds: Sequence[Kind], world: int, ranks_per_node: int | None) -> None:
        self.world = world
        self.nodes = np.arange(world) // (ranks_per_node or world)
        self.direct = np.zeros((world, world), np.int64)
        self.relayed = np.zeros((world, world), np.int64)
        self.copied = np.zeros(world, np.int64)
        self._loads = {"network": np.zeros(world, np.int64), "node": np.zeros(world, np.int64)}
        self._arrays: dict[tuple[int, ...], Ranks] = {}
        self._sets: dict[tuple[int, ...], frozenset[int]] = {}
        self._unions: dict[tuple[tuple[int, ...], tuple[int, ...]], frozenset[int]] = {}
        self.kinds = [(kind, tuple(self._route(kind, need) for need in kind.needs)) for kind in kinds]

    def _array(self, ranks: tuple[int, ...]) -> Ranks:
        if ranks not in self._arrays:
            self._arrays[ranks] = np.array(ranks, np.int64)
        return self._arrays[ranks]

    def _set(self, ranks: tuple[int, ...]) -> frozenset[int]:
        if ranks not in self._sets:
            self._sets[ranks] = frozenset(ranks)
        return self._sets[ranks]

    def _route(self, kind: Kind, need: Need) -> Route:
        needers, holders = self._set(need.needers), self._set(need.holders)
        ranks = self._unions.setdefault((need.needers, need.holders), needers | holders)
        local = needers & holders
        count = len(kind.tensors)
        for target in need.targets if local else ():
            size = need.box.size * ITEM_BYTES[kind.destination_dtypes[target]]
            self.copied[list(local)] += count * size
        if len(local) == len(needers):
            return Route(need, ranks, local, ())
        remote = need.needers if not local else tuple(rank for rank in need.needers if rank not in local)
        flows = tuple(self._flows(need, self._array(remote)))
        for flow in flows:
            self._account(flow, need, count)
        for target in need.targets[1:]:
            self.copied[list(remote)] += count * need.box.size * ITEM_BYTES[kind.destination_dtypes[target]]
        return Route(need, ranks, local, flows)

    def _flows(self, need: Need, receivers: Ranks) -> Iterator[Flow]:
        holders = self._array(need.holders)
        served = np.isin(self.nodes[receivers], self.nodes[holders])
        for node in np.unique(self.nodes[receivers[served]]):
            near = holders[self.nodes[holders] == node]
            yield Flow(self._by_load(near, "node"), receivers[served & (self.nodes[receivers] == node)])
        far = receivers[~served]
        if not len(far):
            return
        sources = self._by_load(holders, "network")
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank, node in zip(far.tolist(), self.nodes[far].tolist(), strict=True):
            by_node[node].append(rank)
        if need.exact and len(by_node) < len(far):
            yield Flow(sources, far, tuple(tuple(team) for team in by_node.values()))
        else:
            yield Flow(sources, far)

    def _by_load(self, ranks: Ranks, link: str) -> Ranks:
        if len(ranks) == 1:
            return ranks
        return ranks[np.lexsort((ranks, self._loads[link][ranks]))]

    def _account(self, flow: Flow, need: Need, count: int) -> None:
        """Adds the bytes of `count` tensors to the traffic and to the loads of the sources."""
        item = ITEM_BYTES[need.wire_dtype]
        if flow.teams:
            sizes = np.array([part.size * item if part is not None else 0 for part in flow.parts(need.box)], np.int64)
        else:
            sizes = np.full(len(flow.receivers), need.nbytes, np.int64)
        link = "network" if self.nodes[flow.sources[0]] != self.nodes[flow.receivers[0]] else "node"
        if len(flow.sources) == 1:
            source = flow.sources[0]
            self.direct[source, flow.receivers] += count * sizes
            self._loads[link][source] += count * int(sizes.sum())
        else:
            turns = np.arange(count)[:, None] * len(flow.receivers) + np.arange(len(flow.receivers))
            senders = flow.sources[turns % len(flow.sources)]
            receivers = np.broadcast_to(flow.receivers, senders.shape)
            amounts = np.broadcast_to(sizes, senders.shape)
            np.add.at(self.direct, (senders, receivers), amounts)
            np.add.at(self._loads[link], senders, amounts)
        by_rank = dict(zip(flow.receivers.tolist(), sizes.tolist(), strict=True))
        for team in flow.teams:
            members = np.array(team)
            sent = np.array([by_rank[rank] for rank in team]) * count
            self.relayed[np.ix_(members, members)] += sent[:, None] * (1 - np.eye(len(team), dtype=np.int64))
