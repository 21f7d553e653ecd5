"""A world of ranks in one process: NumPy shards that hold element codes, and every rank's plan carried out on them.

A code names one element of one tensor: after a reshard the destination's shards must be what filling them straight
from the layout gives.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import Tensor
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.plan import Message, Plan, Round, View

Shard = dict[str, npt.NDArray[np.int64]]
UNWRITTEN = -1


def code(tensors: Iterable[Tensor]) -> dict[str, npt.NDArray[np.int64]]:
    """Whole tensors in which every element of all is different, and none is 0 or less."""
    whole, start = {}, 1
    for tensor in tensors:
        whole[tensor.name] = np.arange(start, start + tensor.size).reshape(tensor.shape)
        start += tensor.size
    return whole


def fill(layout: Layout, rank: int, whole: Mapping[str, npt.NDArray[np.int64]], padding: int = 0) -> Shard:
    """The rank's shard as its layout describes it."""
    shard = {name: np.full(param.shape, padding) for name, param in layout.params(rank).items()}
    for piece in layout.pieces(rank):
        box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        shard[piece.param][piece.slices] = whole[piece.tensor][box].reshape(piece.extent)
    return shard


def empty(layout: Layout, rank: int) -> Shard:
    """The rank's shard before anything was written."""
    return {name: np.full(param.shape, UNWRITTEN) for name, param in layout.params(rank).items()}


def carry_out(plans: Mapping[int, Plan], sources: Mapping[int, Shard], destinations: Mapping[int, Shard]) -> None:
    """Runs all ranks' plans in place; AssertionError where an element is written twice or peers disagree."""
    for rank, plan in plans.items():
        for alias in plan.aliases:
            _write(destinations[rank][alias.destination][...], sources[rank][alias.source])
        for copy in plan.copies:
            _write(_at(destinations[rank], copy.destination), _at(sources[rank], copy.source))
        for view in plan.fills:
            _write(_at(destinations[rank], view), np.zeros(view.size, np.int64))
    (count,) = {len(plan.rounds) for plan in plans.values()}
    for k in range(count):
        _carry_out_round({rank: plan.rounds[k] for rank, plan in plans.items()}, sources, destinations)
    for rank, plan in plans.items():
        for copy in plan.echoes:
            _write(_at(destinations[rank], copy.destination), _at(destinations[rank], copy.source))


def _carry_out_round(
    rounds: Mapping[int, Round], sources: Mapping[int, Shard], destinations: Mapping[int, Shard]
) -> None:
    (relay,) = {one.relay for one in rounds.values()}
    flight: dict[tuple[int, int], tuple[Message, npt.NDArray[np.int64]]] = {}
    for rank, one in rounds.items():
        shard = (destinations if relay else sources).get(rank, {})
        for message in one.sends:
            parts = [_at(shard, s.view).reshape(-1) for s in message.segments]
            assert not any((part == UNWRITTEN).any() for part in parts)
            flight[rank, message.peer] = message, np.concatenate(parts)
    for rank, one in rounds.items():
        for message in one.receives:
            sent, payload = flight.pop((message.peer, rank))
            assert sent.nbytes == message.nbytes == sum(s.nbytes for s in message.segments)
            assert [(s.wire_dtype, s.view.size) for s in sent.segments] == [
                (s.wire_dtype, s.view.size) for s in message.segments
            ]
            at = 0
            for segment in message.segments:
                _write(_at(destinations[rank], segment.view), payload[at : at + segment.view.size])
                at += segment.view.size
    assert not flight


def _at(shard: Shard, view: View) -> npt.NDArray[np.int64]:
    return shard[view.param][view.slices]


def _write(target: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
    assert (target == UNWRITTEN).all(), "an element is written twice"
    target[...] = values.reshape(target.shape)


def same(a: Shard, b: Shard) -> bool:
    """Whether two shards are equal in every element."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
