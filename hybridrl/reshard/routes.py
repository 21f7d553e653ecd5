"""Who sends what to whom: same rank, else same node, else the least loaded replica.

The rule is a function of both layouts alone. Kinds are routed in order; the replicas that could serve a kind are
sorted by the bytes that earlier kinds already load them with, and its movements are dealt to them in turn. So every
rank knows every load without asking, and none knows only its own.

Where several ranks of a node need the same box and none of that node has it, each fetches a stripe of it over the
network, and they pass stripes on to each other within the node (`Flow.striped`): the box crosses the network once a
node instead of once a rank. No rank receives a byte twice either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES, Box
from hybridrl.reshard.boxes import stripe
from hybridrl.reshard.survey import Kind, Need

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Teams:
    """Receivers of one node, who each fetch a stripe and pass it on to the others."""

    members: tuple[tuple[int, ...], ...]
    """Ranks of each team, in ascending order."""
    counts: Ranks
    """Size of each receiver's team."""
    places: Ranks
    """Where each receiver stands in its team."""

    def of(self, rank: int) -> tuple[int, ...]:
        """The team that a receiver belongs to."""
        return next(team for team in self.members if rank in team)


@dataclass(frozen=True, slots=True)
class Flow:
    """`receivers` get a box from `sources`, who are dealt out in turn.

    The `i`-th of `n` receivers gets the kind's `j`-th tensor from source `(j·n + i) mod len(sources)`.
    """

    sources: Ranks
    receivers: Ranks
    teams: Teams | None = None
    """Who shares the box with whom, each receiving its stripe; None where each receives the whole box."""

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

    def part(self, box: Box, receiver: int) -> Box | None:
        """What a receiver gets from its source: the box, or its stripe of it (None for an empty one)."""
        if self.teams is None:
            return box
        return stripe(box, int(self.teams.counts[receiver]), int(self.teams.places[receiver]))

    def sizes(self, box: Box) -> Ranks:
        """Elements that each receiver gets from its source."""
        if self.teams is None:
            return np.full(len(self.receivers), box.size, np.int64)
        found = np.zeros(len(self.receivers), np.int64)
        for count in {len(team) for team in self.teams.members}:
            parts = [stripe(box, count, i) for i in range(count)]
            elements = np.array([part.size if part is not None else 0 for part in parts])
            own = self.teams.counts == count
            found[own] = elements[self.teams.places[own]]
        return found


@dataclass(frozen=True, slots=True)
class Route:
    """How one need of a kind is served."""

    need: Need
    ranks: frozenset[int]
    """Ranks that need the box or have it: all others have no part in the route."""
    local: frozenset[int]
    """Ranks that need the box and have it."""
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Needers and holders of a box, sorted by where they are; many needs have the same ones."""

    ranks: frozenset[int]
    local: frozenset[int]
    near: list[tuple[Ranks, Ranks]]
    """For each node that lacks the box in part: its ranks that have it, and those that need it."""
    far: Ranks
    teams: Teams | None


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
        self._pairings: dict[tuple[tuple[int, ...], tuple[int, ...]], _Pairing] = {}
        self.kinds = [(kind, tuple(self._route(kind, need) for need in kind.needs)) for kind in kinds]

    def _array(self, ranks: tuple[int, ...]) -> Ranks:
        if ranks not in self._arrays:
            self._arrays[ranks] = np.array(ranks, np.int64)
        return self._arrays[ranks]

    def _route(self, kind: Kind, need: Need) -> Route:
        key = need.needers, need.holders
        if key not in self._pairings:
            self._pairings[key] = self._pair(*key)
        pairing = self._pairings[key]
        count = len(kind.tensors)
        for number, target in enumerate(need.targets):
            # Beside the first target, which receives, every target is copied to on all ranks.
            written = list(pairing.local) if number == 0 else list(need.needers)
            self.copied[written] += count * need.box.size * ITEM_BYTES[kind.destination_dtypes[target]]
        flows = [Flow(self._by_load(near, "node"), receivers) for near, receivers in pairing.near]
        if len(pairing.far):
            sources = self._by_load(self._array(need.holders), "network")
            flows.append(Flow(sources, pairing.far, pairing.teams if need.exact else None))
        for flow in flows:
            self._account(flow, need, count)
        return Route(need, pairing.ranks, pairing.local, tuple(flows))

    def _pair(self, needers: tuple[int, ...], holders: tuple[int, ...]) -> _Pairing:
        """Sorts out who has the box, who has it on its node, and who shares a node without it."""
        have = set(holders)
        local = frozenset(rank for rank in needers if rank in have)
        receivers = np.array([rank for rank in needers if rank not in have], np.int64)
        sources, nodes = self._array(holders), self.nodes[receivers]
        served = np.isin(nodes, self.nodes[sources])
        near = [
            (sources[self.nodes[sources] == node], receivers[served & (nodes == node)])
            for node in np.unique(nodes[served])
        ]
        far = receivers[~served]
        members, places, counts = np.unique(nodes[~served], return_inverse=True, return_counts=True)
        teams = None
        if len(members) < len(far):
            # Receivers are in ascending order, so those of a node stand together.
            starts = np.cumsum(counts) - counts
            ranks = tuple(tuple(far[a : a + n].tolist()) for a, n in zip(starts, counts, strict=True))
            teams = Teams(ranks, counts[places], np.arange(len(far)) - starts[places])
        return _Pairing(frozenset(needers) | have, local, near, far, teams)

    def _by_load(self, ranks: Ranks, link: str) -> Ranks:
        if len(ranks) == 1:
            return ranks
        return ranks[np.lexsort((ranks, self._loads[link][ranks]))]

    def _account(self, flow: Flow, need: Need, count: int) -> None:
        """Adds the bytes of `count` tensors to the traffic and to the loads of the sources."""
        sizes = flow.sizes(need.box) * ITEM_BYTES[need.wire_dtype]
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
        if flow.teams is not None:
            self._account_relays(flow.teams, flow.receivers, count * sizes)

    def _account_relays(self, teams: Teams, receivers: Ranks, sizes: Ranks) -> None:
        """Every member of a team sends its stripe to all others."""
        for shift in range(1, int(teams.counts.max())):
            start = np.arange(len(receivers)) - teams.places
            mates = receivers[start + (teams.places + shift) % teams.counts]
            self.relayed[receivers, mates] += np.where(shift < teams.counts, sizes, 0)
