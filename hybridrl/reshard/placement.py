"""Which rank plays which slot of the engine: the permutation that leaves most bytes where they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.survey import Kind, survey


class PlaceableLayout(Layout, Protocol):
    """A layout whose ranks may be permuted."""

    @property
    def slots(self) -> Sequence[int]:
        """The rank in each slot."""

    def with_ranks(self, ranks: Sequence[int]) -> "PlaceableLayout":
        """The same layout with these ranks in its slots."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every slot, and the bytes that stay on their rank with it and without it."""

    ranks: tuple[int, ...]
    kept_bytes: int
    identity_kept_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that need not be received, over all ranks, because of the permutation."""
        return self.kept_bytes - self.identity_kept_bytes


def place(source: Layout, destination: PlaceableLayout, ranks_per_node: int | None = None) -> Placement:
    """The best permutation of the destination's ranks.

    Slots that share a node stay together on one node, as whole groups: so no replica is spread over more nodes than it
    was. Within these limits the bytes kept are the most possible; among equals, ranks stay where they are.
    """
    slots = tuple(destination.slots)
    kept = _kept_bytes(survey(source, destination), slots)
    # One byte weighs more than all ranks staying in place.
    value = kept * (len(slots) + 1) + np.eye(len(slots), dtype=np.int64)
    groups = _groups(slots, ranks_per_node)
    chosen = np.arange(len(slots))
    for size in {len(group) for group in groups}:
        alike = [group for group in groups if len(group) == size]
        for group, home, order in _assign_groups(value, alike):
            chosen[group] = home[order]
    rows = np.arange(len(slots))
    ranks = tuple(slots[i] for i in chosen)
    return Placement(ranks, int(kept[rows, chosen].sum()), int(kept[rows, rows].sum()))


def _kept_bytes(kinds: Sequence[Kind], slots: Sequence[int]) -> npt.NDArray[np.int64]:
    """Bytes that slot `i` (row) needs and the rank now in slot `j` (column) holds."""
    at = {rank: slot for slot, rank in enumerate(slots)}
    kept = np.zeros((len(slots), len(slots)), np.int64)
    for kind in kinds:
        for need in kind.needs:
            rows = [at[rank] for rank in need.needers]
            columns = [at[rank] for rank in need.holders if rank in at]
            kept[np.ix_(rows, columns)] += len(kind.tensors) * need.box.size * ITEM_BYTES[need.wire_dtype]
    return kept


def _groups(slots: Sequence[int], ranks_per_node: int | None) -> list[npt.NDArray[np.int64]]:
    """Slots by the node that their ranks are on."""
    nodes = np.array(slots) // (ranks_per_node or max(slots) + 1)
    return [np.flatnonzero(nodes == node) for node in np.unique(nodes)]


def _assign_groups(
    value: npt.NDArray[np.int64], groups: Sequence[npt.NDArray[np.int64]]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """For each group of slots, the group whose ranks it gets, and in which order."""
    # Most pairs of nodes look alike.
    known: dict[bytes, npt.NDArray[np.int64]] = {}

    def best(part: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        key = part.tobytes()
        if key not in known:
            known[key] = assignment(part)
        return known[key]

    orders = [[best(value[np.ix_(group, home)]) for home in groups] for group in groups]
    worth = np.array(
        [
            [int(value[group, home[order]].sum()) for home, order in zip(groups, row, strict=True)]
            for group, row in zip(groups, orders, strict=True)
        ]
    )
    for i, j in enumerate(assignment(worth).tolist()):
        yield groups[i], groups[j], orders[i][j]


def assignment(value: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The column of each row such that the sum is largest: the Hungarian method with potentials, O(n³).

    Args:
        value: shape (n, n), whole numbers. (Kuhn 1955; the shortest augmenting path form of Jonker and Volgenant 1987.)
    """
    count = len(value)
    cost = value.max(initial=0) - value
    row_price, column_price = np.zeros(count, np.int64), np.zeros(count, np.int64)
    row_of = np.full(count, -1)
    far = np.iinfo(np.int64).max
    for row in range(count):
        slack, before = np.full(count, far), np.full(count, -1)
        done = np.zeros(count, bool)
        at, column = row, -1
        while True:
            reduced = cost[at] - row_price[at] - column_price
            closer = ~done & (reduced < slack)
            slack[closer], before[closer] = reduced[closer], column
            nearest = int(np.where(done, far, slack).argmin())
            step = slack[nearest]
            row_price[row] += step
            row_price[row_of[done]] += step
            column_price[done] -= step
            slack[~done] -= step
            done[nearest] = True
            column, at = nearest, int(row_of[nearest])
            if at < 0:
                break
        while column >= 0:
            previous = int(before[column])
            row_of[column] = row_of[previous] if previous >= 0 else row
            column = previous
    chosen = np.empty(count, np.int64)
    chosen[row_of] = np.arange(count)
    return chosen
