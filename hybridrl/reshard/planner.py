"""The planner: from two layouts to what each rank does. Pure: no torch, no communication, no framework.

    planner = Planner(source, destination, bucket_bytes=2**28, ranks_per_node=8)
    plan = planner.plan(rank)

A planner surveys both layouts once (the part that all ranks compute alike) and then plans for any rank, on any
machine. What a rank receives is exactly what it needs and has not: the lower bound. What it needs twice (a tied head
beside the embedding) it receives once.
"""

from collections.abc import Callable, Sequence

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.assembly import Assembler
from hybridrl.reshard.layout import Layout, PaddedLayout
from hybridrl.reshard.local import Shard, find_aliases, find_fills
from hybridrl.reshard.moves import Move
from hybridrl.reshard.plan import Alias, Copy, Derived, Plan
from hybridrl.reshard.rounds import make_rounds
from hybridrl.reshard.routes import Routes
from hybridrl.reshard.schedule import BucketError, make_schedule
from hybridrl.reshard.survey import survey

DEFAULT_BUCKET_BYTES = 256 * 2**20
PAGED_PARTS = 4
"""Where one copy of the weights drains on one side as it fills on the other, staging of each way is half a bucket at
most; the other bucket is for both sides to drain and fill unevenly."""


class Planner:
    """Plans the movement of all weights of a model from one layout to another.

    Args:
        source, destination: their ranks may be equal, overlap or be disjoint.
        bucket_bytes: most bytes that a rank may stage for sending, and again for receiving, in one round.
        ranks_per_node: ranks `n·ranks_per_node …` share node `n`, within which they prefer to exchange; None where all
            ranks are equally near.
        alias: whether the destination may use the source's storage where the two are the same bytes.

    Raises PlanError, which names every tensor that could not arrive whole, and BucketError.
    """

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ranks_per_node: int | None = None,
        alias: bool = True,
    ) -> None:
        for name, value in (("bucket_bytes", bucket_bytes), ("ranks_per_node", ranks_per_node)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.source = source
        self.destination = destination
        self.bucket_bytes = bucket_bytes
        self.ranks_per_node = ranks_per_node
        self.alias = alias
        self.world = 1 + max(*source.ranks, *destination.ranks)
        self.routes = Routes(survey(source, destination), self.world, ranks_per_node)
        dtypes = {route.need.wire_dtype for _, served in self.routes.kinds for route in served if route.flows}
        self.item_bytes = max((ITEM_BYTES[dtype] for dtype in dtypes), default=1)
        self.direct = make_schedule(self.routes.direct, bucket_bytes, self.item_bytes)
        self.relayed = make_schedule(self.routes.relayed, bucket_bytes, self.item_bytes)
        self._source_ranks = frozenset(source.ranks)
        self._destination_ranks = frozenset(destination.ranks)
        self._last_shards: tuple[int, tuple[Shard, Shard]] = -1, (({}, ()), ({}, ()))

    def plan(self, rank: int) -> Plan:
        """What `rank` does; nothing, for a rank of neither layout.

        Raises PlanError where the destination's parameters on this rank would not be covered exactly once.
        """
        aliases = self.aliases(rank)
        aliased = {alias.destination for alias in aliases}
        moves = Assembler(self.source, self.destination, rank, aliased).collect(self.routes)
        return Plan(
            rank=rank,
            bucket_bytes=self.bucket_bytes,
            aliases=aliases,
            copies=_copies(moves.copies),
            fills=tuple(v for v in find_fills(rank, self._shards(rank)[1]) if v.param not in aliased),
            rounds=(
                *make_rounds(rank, moves.direct.sends, moves.direct.receives, self.direct, relay=False),
                *make_rounds(rank, moves.relayed.sends, moves.relayed.receives, self.relayed, relay=True),
            ),
            echoes=_copies(moves.echoes),
            derived=self._derived(rank),
            planner=self,
        )

    def aliases(self, rank: int) -> tuple[Alias, ...]:
        """The rank's aliases alone, which cost less than its plan."""
        padding = isinstance(self.source, PaddedLayout) and self.source.zero_padding
        return find_aliases(*self._shards(rank), zero_padding=padding) if self.alias else ()

    def destination_bytes(self, rank: int) -> int:
        """Bytes of the rank's destination parameters."""
        return sum(param.nbytes for param in self._shards(rank)[1][0].values())

    def inverse(self) -> "Planner":
        """The planner of the way back, with the same limits. Raises as a planner of the exchanged layouts would."""
        return Planner(
            self.destination,
            self.source,
            bucket_bytes=self.bucket_bytes,
            ranks_per_node=self.ranks_per_node,
            alias=self.alias,
        )

    def _shards(self, rank: int) -> tuple[Shard, Shard]:
        """The rank's parameters and pieces on both sides, empty where it takes no part."""
        if self._last_shards[0] != rank:
            source = _shard(self.source, rank) if rank in self._source_ranks else ({}, ())
            destination = _shard(self.destination, rank) if rank in self._destination_ranks else ({}, ())
            self._last_shards = rank, (source, destination)
        return self._last_shards[1]

    def _derived(self, rank: int) -> tuple[Derived, ...]:
        listed: Callable[[int], Sequence[Derived]] | None = getattr(self.destination, "derived", None)
        return tuple(listed(rank)) if listed and rank in self._destination_ranks else ()


def staged_planner(
    source: Layout, destination: Layout, bucket_bytes: int, ranks_per_node: int | None
) -> tuple[Planner, int]:
    """A planner, and how many of its rounds are staged at a time: two of half a bucket, or one of a whole bucket where
    halves are too small. Raises as `Planner` does."""
    item = max(ITEM_BYTES.values())  # the exchange rounds each buffer up to whole elements: leave room for that
    half, whole = (max(1, size // item * item) for size in (bucket_bytes // 2, bucket_bytes))
    try:
        return Planner(source, destination, bucket_bytes=half, ranks_per_node=ranks_per_node), 2
    except BucketError:
        return Planner(source, destination, bucket_bytes=whole, ranks_per_node=ranks_per_node), 1


def _shard(layout: Layout, rank: int) -> Shard:
    return layout.params(rank), layout.pieces(rank)


def _copies(moves: Sequence[Move]) -> tuple[Copy, ...]:
    return tuple(Copy(move.source, move.destination) for move in moves)
