"""Rounds: the streams between every two ranks, cut so that no rank ever stages more than a bucket.

The movements from one rank to another form a stream, in layer order (elements of the widest dtype before all others,
which keeps every element aligned). With `n` rounds, round `k` carries the bytes `[T·k/n, T·(k+1)/n)` of every stream,
to the element, `T` being its length: all streams advance alike and end together, so that links are equally busy in
every round and a source can be released as it drains, layer by layer. `n` is the smallest number for which the most
loaded rank stays within its bucket. As every rank knows the length of every stream (see `routes`), both ends of a
stream cut it at the same elements without asking each other.

Layer order holds within each stream. Where pipeline stages are different ranks, all of them send at once, each from
its first layer on: strict order over the whole model would leave all stages but one idle.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.moves import Move, cut
from hybridrl.reshard.plan import Message, Round, Segment


class BucketError(ValueError):
    """The bucket is too small to hold an element for every peer."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The movements from one rank to another, and the bytes that the traffic matrix has for them."""

    moves: Sequence[Move]
    nbytes: int


def count_rounds(traffic: npt.NDArray[np.int64], bucket_bytes: int, item_bytes: int) -> int:
    """Fewest rounds in which no rank sends or receives more than `bucket_bytes` at a time, alignment included.

    Args:
        traffic: bytes from row to column, shape (world, world).
        item_bytes: size of the largest element on the wire; every message starts at a multiple of it.

    Raises BucketError where a bucket cannot hold an element for each peer of the busiest rank.
    """
    totals = np.concatenate([traffic.sum(0), traffic.sum(1)])
    peers = np.concatenate([(traffic > 0).sum(0), (traffic > 0).sum(1)])
    if not totals.any():
        return 0
    if (totals + peers * (item_bytes - 1)).max() <= bucket_bytes:
        return 1
    # A message may exceed its even share by an element's rounding at both of its ends and by its alignment.
    slack = 1 + 2 * item_bytes
    room = bucket_bytes - peers * slack
    if (room <= 0).any():
        least = int(peers.max()) * slack + 1
        raise BucketError(f"bucket_bytes={bucket_bytes} holds no element for each of {peers.max()} peers: give {least}")
    return int((-(-totals // room)).max())


def staging_peak(outgoing: npt.NDArray[np.int64], incoming: npt.NDArray[np.int64], count: int, item_bytes: int) -> int:
    """Most bytes that a rank stages at once for these streams' lengths (shape (world,)), both buffers together."""
    return max((_staged(outgoing, count, item_bytes) + _staged(incoming, count, item_bytes)).tolist(), default=0)


def _staged(lengths: npt.NDArray[np.int64], count: int, item_bytes: int) -> npt.NDArray[np.int64]:
    """Bytes of one buffer that each round uses."""
    lengths = lengths[lengths > 0, None]
    ends = lengths * np.arange(count + 1) // max(count, 1) // item_bytes * item_bytes
    ends[:, -1:] = lengths
    sizes = np.diff(ends, axis=1)
    padding = -sizes % item_bytes
    # The padding after a round's last message is not used.
    last = sizes.shape[0] - 1 - (sizes[::-1] > 0).argmax(0) if len(sizes) else np.zeros(count, np.int64)
    unused = padding[last, np.arange(count)] if len(sizes) else 0
    used: npt.NDArray[np.int64] = (sizes + padding * (sizes > 0)).sum(0) - unused
    return used


def make_rounds(
    sends: Mapping[int, Stream], receives: Mapping[int, Stream], count: int, item_bytes: int, *, relay: bool
) -> list[Round]:
    """One rank's side of `count` rounds."""
    outgoing = [_messages(sends[peer], peer, count, item_bytes, sending=True) for peer in sorted(sends)]
    incoming = [_messages(receives[peer], peer, count, item_bytes, sending=False) for peer in sorted(receives)]
    return [
        Round(
            _lay_out([messages[k] for messages in outgoing], item_bytes),
            _lay_out([messages[k] for messages in incoming], item_bytes),
            relay,
        )
        for k in range(count)
    ]


def _messages(stream: Stream, peer: int, count: int, item_bytes: int, *, sending: bool) -> list[Message]:
    """The stream's messages, one a round, with offsets from the start of the message."""
    moves = sorted(stream.moves, key=lambda move: -ITEM_BYTES[move.wire_dtype])
    ends = list(accumulate(move.nbytes for move in moves))
    if (ends[-1] if ends else 0) != stream.nbytes:
        raise AssertionError(f"stream with rank {peer} has {ends[-1:]} bytes and the traffic matrix {stream.nbytes}")
    found, at = [], (0, 0)
    for k in range(1, count + 1):
        byte = stream.nbytes * k // count // item_bytes * item_bytes if k < count else stream.nbytes
        upto = _position(moves, ends, byte)
        found.append(_message(moves, peer, at, upto, sending=sending))
        at = upto
    return found


def _position(moves: Sequence[Move], ends: Sequence[int], byte: int) -> tuple[int, int]:
    """The element border at a byte of the stream: index of the movement, elements of it before."""
    if byte >= ends[-1]:
        return len(moves), 0
    index = bisect_left(ends, byte + 1)
    move = moves[index]
    return index, (byte - (ends[index] - move.nbytes)) // ITEM_BYTES[move.wire_dtype]


def _message(
    moves: Sequence[Move], peer: int, start: tuple[int, int], stop: tuple[int, int], *, sending: bool
) -> Message:
    segments, offset = [], 0
    for index in range(start[0], min(stop[0] + 1, len(moves))):
        move = moves[index]
        first = start[1] if index == start[0] else 0
        last = stop[1] if index == stop[0] else move.source.size
        if first < last:
            for view in cut(move, first, last, sending):
                segments.append(Segment(view, move.wire_dtype, offset))
                offset += segments[-1].nbytes
    return Message(peer, 0, offset, tuple(segments))


def _lay_out(messages: Sequence[Message], item_bytes: int) -> tuple[Message, ...]:
    """Places a round's messages one after another in the staging buffer; empty ones are left out."""
    placed, offset = [], 0
    for message in messages:
        if message.nbytes:
            segments = tuple(Segment(s.view, s.wire_dtype, offset + s.offset) for s in message.segments)
            placed.append(Message(message.peer, offset, message.nbytes, segments))
            offset += -(-message.nbytes // item_bytes) * item_bytes
    return tuple(placed)
