"""From routes to one rank's movements: what it copies, and its streams to and from every peer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from hybridrl.models.weights import Box, Tensor
from hybridrl.reshard.boxes import stripe
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.moves import Move, merge, view_of
from hybridrl.reshard.plan import View
from hybridrl.reshard.routes import Flow, Route, Routes
from hybridrl.reshard.survey import Kind, Need

Order = tuple[int, ...]
"""Where a movement stands in its stream: the tensor's index first, so that streams are in layer order."""


class Streams(NamedTuple):
    """One rank's movements to (`sends`) and from (`receives`) each peer, merged and in order."""

    sends: dict[int, list[Move]]
    receives: dict[int, list[Move]]


class RankMoves(NamedTuple):
    """All movements of one rank."""

    copies: list[Move]
    echoes: list[Move]
    direct: Streams
    relayed: Streams


class Assembler:
    """Finds one rank's movements.

    Args:
        aliased: destination parameters of the rank that are the source's storage, and need no copy.
    """

    def __init__(self, source: Layout, destination: Layout, rank: int, aliased: Iterable[str]) -> None:
        self.rank = rank
        self.aliased = frozenset(aliased)
        # Every need of a kind asks for the same tensors.
        self._have = lru_cache(maxsize=None)(source.holders)
        self._want = lru_cache(maxsize=None)(destination.holders)
        self._copies: list[tuple[Order, Move]] = []
        self._echoes: list[tuple[Order, Move]] = []
        self._streams: dict[tuple[bool, bool], dict[int, list[tuple[Order, Move]]]] = {
            (relay, sending): defaultdict(list) for relay in (False, True) for sending in (False, True)
        }

    def collect(self, routes: Routes) -> RankMoves:
        """The rank's part in all routes."""
        for kind, served in routes.kinds:
            self._have.cache_clear()
            self._want.cache_clear()
            for number, route in enumerate(served):
                if self.rank not in route.ranks:
                    continue
                if self.rank in route.local:
                    self._copy(kind, number, route.need)
                for place, flow in enumerate(route.flows):
                    self._flow(kind, (number, place), route, flow)
        merged = {
            key: {peer: _in_order(moves) for peer, moves in sorted(peers.items())}
            for key, peers in self._streams.items()
        }
        return RankMoves(
            _in_order(self._copies),
            _in_order(self._echoes),
            Streams(merged[False, True], merged[False, False]),
            Streams(merged[True, True], merged[True, False]),
        )

    def _copy(self, kind: Kind, number: int, need: Need) -> None:
        for index, tensor in kind.tensors:
            source = self._source_view(kind, need, tensor, self.rank, need.box)
            for target in need.targets:
                view = self._target_view(kind, tensor, target, need.box)
                if view.param not in self.aliased:
                    self._copies.append(((index, number, target), Move(source, view, source.dtype)))

    def _flow(self, kind: Kind, place: Order, route: Route, flow: Flow) -> None:
        need, me, sender = route.need, flow.receiver_index(self.rank), flow.source_index(self.rank)
        if me is None and sender is None:
            return
        stripes = self._stripes(flow, need, me)
        for ordinal, (index, tensor) in enumerate(kind.tensors):
            order = (index, *place)
            if me is not None:
                box = flow.part(need.box, me)
                self._direct(kind, need, tensor, (*order, me), flow.source(ordinal, me), self.rank, box)
                self._relay(kind, need, tensor, order, stripes)
                self._echo(kind, need, tensor, order)
            for i in flow.receivers_of(ordinal, sender) if sender is not None else ():
                box = flow.part(need.box, i)
                self._direct(kind, need, tensor, (*order, i), self.rank, int(flow.receivers[i]), box)

    def _stripes(self, flow: Flow, need: Need, me: int | None) -> dict[int, Box | None]:
        """The stripe that each member of this rank's team fetches; none where boxes are not shared."""
        if me is None or flow.teams is None:
            return {}
        team = flow.teams.of(self.rank)
        return {rank: stripe(need.box, len(team), i) for i, rank in enumerate(team)}

    def _direct(
        self, kind: Kind, need: Need, tensor: Tensor, order: Order, source: int, receiver: int, box: Box | None
    ) -> None:
        """A movement from a source's parameter to the first target of a receiver, of whom this rank is one."""
        if box is None:
            return
        have = self._source_view(kind, need, tensor, source, box)
        want = self._target_view(kind, tensor, need.targets[0], box)
        sending = source == self.rank
        peer = receiver if sending else source
        self._streams[False, sending][peer].append((order, Move(have, want, need.wire_dtype)))

    def _relay(self, kind: Kind, need: Need, tensor: Tensor, place: Order, parts: dict[int, Box | None]) -> None:
        """Passes this rank's stripe to its team and takes theirs."""
        for position, (rank, box) in enumerate(parts.items()):
            if box is None:
                continue
            view = self._target_view(kind, tensor, need.targets[0], box)
            move = Move(view, view, need.wire_dtype)
            if rank != self.rank:
                self._streams[True, False][rank].append(((*place, position), move))
            else:
                for peer in parts:
                    if peer != self.rank:
                        self._streams[True, True][peer].append(((*place, position), move))

    def _echo(self, kind: Kind, need: Need, tensor: Tensor, place: Order) -> None:
        for target in need.targets[1:]:
            first = self._target_view(kind, tensor, need.targets[0], need.box)
            view = self._target_view(kind, tensor, target, need.box)
            self._echoes.append(((*place, target), Move(first, view, first.dtype)))

    def _source_view(self, kind: Kind, need: Need, tensor: Tensor, rank: int, box: Box) -> View:
        entry = need.entries[rank]
        return view_of(self._have(tensor.name)[entry].piece, box, kind.source_dtypes[entry])

    def _target_view(self, kind: Kind, tensor: Tensor, target: int, box: Box) -> View:
        return view_of(self._want(tensor.name)[target].piece, box, kind.destination_dtypes[target])


def _in_order(moves: list[tuple[Order, Move]]) -> list[Move]:
    moves.sort(key=lambda item: item[0])
    return merge(_moves(moves))


def _moves(ordered: Iterable[tuple[Order, Move]]) -> Iterator[Move]:
    return (move for _, move in ordered)
