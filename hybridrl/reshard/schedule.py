"""When each byte moves: how the streams between every two ranks are spread over rounds, within every rank's bucket.

The movements from one rank to another form a stream of `T` bytes, in layer order. A long stream takes part in all `n`
rounds and carries the bytes `[T·k/n, T·(k+1)/n)` in round `k`: long streams advance alike and end together, so that
links are equally busy in every round and a source can be released as it drains, layer by layer. `n` is the smallest
number for which the most loaded rank stays within its bucket. A stream that is too short to be worth `n` messages
takes fewer rounds in a row, from one that a hash of its two ranks gives.

As every rank knows the length of every stream (see `routes`), both ends cut it at the same bytes without asking.

Layer order holds within each stream. Where pipeline stages are different ranks, all of them send at once, each from
its first layer on: strict order over the whole model would leave all stages but one idle.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.int64]

LEAST_MESSAGE = 2**20
"""Shorter messages are not worth a round of their own, in bytes; in small buckets, a 64th of the bucket."""


class BucketError(ValueError):
    """The bucket is too small to hold an element for every peer."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which rounds each stream moves: row to column, arrays of shape (world, world)."""

    traffic: Bytes
    """Bytes of each stream."""
    count: int
    """Rounds in all."""
    first: Bytes
    """The first round that a stream takes part in."""
    span: Bytes
    """How many rounds in a row it takes part in."""
    item_bytes: int
    """Size of the largest element on the wire; messages start at multiples of it, and all but the last end there."""

    def ends(self, source: int, receiver: int) -> list[int]:
        """Where in the stream the message of each round ends, one a round."""
        pair = (slice(source, source + 1), slice(receiver, receiver + 1))
        return [int(end) for end in self._ends(*(part[pair][0] for part in (self.traffic, self.first, self.span)))[0]]

    def _ends(self, lengths: Bytes, first: Bytes, span: Bytes) -> Bytes:
        """Ends by stream and round, shape (streams, count)."""
        done = np.clip(np.arange(1, self.count + 1) - first[:, None], 0, span[:, None])
        cut = lengths[:, None] * done // span[:, None] // self.item_bytes * self.item_bytes
        ends: Bytes = np.where(done == span[:, None], lengths[:, None], cut)
        return ends

    def staged(self, rank: int) -> tuple[Bytes, Bytes]:
        """Bytes of the rank's send buffer and of its receive buffer that each round uses, shape (count,)."""
        return self._staged((rank, slice(None))), self._staged((slice(None), rank))

    def _staged(self, side: tuple[int | slice, int | slice]) -> Bytes:
        lengths = self.traffic[side]
        own = lengths > 0
        if not own.any():
            return np.zeros(self.count, np.int64)
        ends = self._ends(lengths[own], self.first[side][own], self.span[side][own])
        sizes = np.diff(ends, axis=1, prepend=0)
        padding = -sizes % self.item_bytes
        # The padding after a round's last message is not used.
        last = len(sizes) - 1 - (sizes[::-1] > 0).argmax(0)
        used: Bytes = (sizes + padding).sum(0) - padding[last, np.arange(self.count)]
        return used

    def peak(self, rank: int) -> int:
        """Most bytes that the rank stages at once, both buffers together."""
        out, into = self.staged(rank)
        return int((out + into).max(initial=0))


def make_schedule(traffic: Bytes, bucket_bytes: int, item_bytes: int) -> Schedule:
    """The schedule of these streams in which no rank sends, or receives, more than `bucket_bytes` in a round.

    Raises BucketError where a bucket cannot hold an element for each peer of the busiest rank.
    """
    count = _fewest_rounds(traffic, bucket_bytes, item_bytes)
    even = Schedule(traffic, count, np.zeros_like(traffic), np.full_like(traffic, max(count, 1)), item_bytes)
    if count <= 1:
        return even
    least = max(min(LEAST_MESSAGE, bucket_bytes // 64), 1)
    pairs = np.nonzero(traffic)
    # Knuth's multiplicative hash
    mixed = (pairs[0] * len(traffic) + pairs[1]) * 2654435761 % 2**32
    for more in (count, count * 11 // 10 + 1, count * 13 // 10 + 1):
        span = np.clip(traffic[pairs] // least, 1, more)
        first = mixed % (more - span + 1)
        sizes = traffic[pairs] // span + _slack(item_bytes)
        if _most_staged(pairs, first, span, sizes, (len(traffic), more + 1)) <= bucket_bytes:
            return Schedule(traffic, more, _spread(pairs, first, traffic), _spread(pairs, span, traffic), item_bytes)
    return even


def _spread(pairs: tuple[Bytes, ...], values: Bytes, like: Bytes) -> Bytes:
    """An array that has these values at these pairs."""
    found = np.zeros_like(like)
    found[pairs] = values
    return found


def _fewest_rounds(traffic: Bytes, bucket_bytes: int, item_bytes: int) -> int:
    """Rounds that are enough if every stream takes part in all of them."""
    totals = np.concatenate([traffic.sum(0), traffic.sum(1)])
    peers = np.concatenate([(traffic > 0).sum(0), (traffic > 0).sum(1)])
    if not totals.any():
        return 0
    if (totals + peers * (item_bytes - 1)).max() <= bucket_bytes:
        return 1
    room = bucket_bytes - peers * _slack(item_bytes)
    if (room <= 0).any():
        least = int(peers.max()) * _slack(item_bytes) + 1
        raise BucketError(f"bucket_bytes={bucket_bytes} holds no element for each of {peers.max()} peers: give {least}")
    return int((-(-totals // room)).max())


def _slack(item_bytes: int) -> int:
    """Bytes by which a message may exceed its even share: rounding to an element at both ends, and alignment."""
    return 1 + 2 * item_bytes


def _most_staged(pairs: tuple[Bytes, ...], first: Bytes, span: Bytes, sizes: Bytes, shape: tuple[int, int]) -> int:
    """Most bytes that any rank stages in one direction, with messages of these sizes in these rounds."""
    most = 0
    for ranks in pairs:
        change = np.zeros(shape, np.int64)
        np.add.at(change, (ranks, first), sizes)
        np.add.at(change, (ranks, first + span), -sizes)
        most = max(most, int(change.cumsum(1).max()))
    return most
