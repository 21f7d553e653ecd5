"""One rank's rounds: its streams to and from its peers, cut into messages and laid out in the staging buffers.

A stream is in layer order, elements of the widest dtype before all others: so every element is aligned to its own size
wherever a message begins. See `schedule` for what moves when.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.moves import Move, cut
from hybridrl.reshard.plan import Message, Round, Segment, View
from hybridrl.reshard.schedule import Schedule


def make_rounds(
    rank: int,
    sends: Mapping[int, Sequence[Move]],
    receives: Mapping[int, Sequence[Move]],
    schedule: Schedule,
    *,
    relay: bool,
) -> list[Round]:
    """The rank's side of all rounds of a schedule, from its movements to and from each peer."""
    outgoing, incoming = ([_Buffer(schedule.item_bytes) for _ in range(schedule.count)] for _ in range(2))
    for peer in sorted(sends):
        _add_messages(outgoing, sends[peer], peer, schedule.ends(rank, peer), sending=True)
    for peer in sorted(receives):
        _add_messages(incoming, receives[peer], peer, schedule.ends(peer, rank), sending=False)
    return [Round(tuple(o.messages), tuple(i.messages), relay) for o, i in zip(outgoing, incoming, strict=True)]


class _Buffer:
    """A staging buffer in one round, filled with one message after another."""

    def __init__(self, item_bytes: int) -> None:
        self.messages: list[Message] = []
        self._item_bytes = item_bytes
        self._end = 0

    def add(self, peer: int, nbytes: int, parts: Iterable[tuple[View, str]]) -> None:
        """Adds a message of these views, which travel as these dtypes."""
        at, segments = self._end, []
        for view, wire_dtype in parts:
            segments.append(Segment(view, wire_dtype, at))
            at += view.size * ITEM_BYTES[wire_dtype]
        self.messages.append(Message(peer, self._end, nbytes, tuple(segments)))
        self._end += -(-nbytes // self._item_bytes) * self._item_bytes


def _add_messages(
    buffers: Sequence[_Buffer], moves: Sequence[Move], peer: int, ends: Sequence[int], *, sending: bool
) -> None:
    """Adds the stream's messages to the rounds in which it has one."""
    moves = sorted(moves, key=lambda move: -ITEM_BYTES[move.wire_dtype])
    borders = list(accumulate((move.nbytes for move in moves), initial=0))
    if borders[-1] != ends[-1]:
        raise AssertionError(f"the stream with rank {peer} has {borders[-1]} bytes, and {ends[-1]} in the schedule")
    start = 0
    for buffer, stop in zip(buffers, ends, strict=True):
        if stop > start:
            buffer.add(peer, stop - start, _parts(moves, borders, start, stop, sending=sending))
        start = stop


def _parts(
    moves: Sequence[Move], borders: Sequence[int], start: int, stop: int, *, sending: bool
) -> Iterator[tuple[View, str]]:
    """The bytes `[start, stop)` of a stream as views of one side's parameters, each with its dtype on the wire."""
    index = bisect_right(borders, start) - 1
    while index < len(moves) and borders[index] < stop:
        move, item = moves[index], ITEM_BYTES[moves[index].wire_dtype]
        first = max(start - borders[index], 0) // item
        last = (min(stop, borders[index + 1]) - borders[index]) // item
        for view in cut(move, first, last, sending):
            yield view, move.wire_dtype
        index += 1
