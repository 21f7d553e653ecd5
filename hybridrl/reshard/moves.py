"""Movements between parameters, merged where they are adjacent on both sides, and cut at any element."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add

from hybridrl.models.weights import ITEM_BYTES, Box, Piece
from hybridrl.reshard.boxes import run
from hybridrl.reshard.plan import View


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that go from one parameter to another; `wire_dtype` is what they travel as."""

    source: View
    destination: View
    wire_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.source.size * ITEM_BYTES[self.wire_dtype]

    def side(self, sending: bool) -> View:
        """The view of the sender or of the receiver."""
        return self.source if sending else self.destination


def view_of(piece: Piece, box: Box, dtype: str) -> View:
    """Where a box of the piece lies in the piece's parameter."""
    if box == piece.box:
        return View(piece.param, piece.offset, piece.extent, dtype)
    lead = len(piece.offset) - len(box.start)
    at = zip(piece.offset[lead:], box.start, piece.box.start, strict=True)
    offset = piece.offset[:lead] + tuple(o + b - p for o, b, p in at)
    return View(piece.param, offset, (1,) * lead + box.shape, dtype)


def merge(moves: Iterable[Move]) -> list[Move]:
    """The same movements, fewer: neighbours between the same two parameters become one.

    A merged movement stands where its first part stood. Both sides of a transfer merge alike, as they see both views.
    """
    runs: dict[tuple[str, str, str], list[tuple[int, Move]]] = {}
    for order, move in enumerate(moves):
        own = runs.setdefault((move.source.param, move.destination.param, move.wire_dtype), [])
        own.append((order, move))
        while len(own) > 1:
            joined = _join(own[-2][1], own[-1][1])
            if joined is None:
                break
            own[-2:] = [(own[-2][0], joined)]
    return [move for _, move in sorted((item for own in runs.values() for item in own), key=lambda item: item[0])]


def _join(a: Move, b: Move) -> Move | None:
    """One movement for two that are neighbours along the same dimension on both sides (dimensions from the last)."""
    for dim in range(1, min(len(a.source.extent), len(a.destination.extent)) + 1):
        if _follows(a.source, b.source, dim) and _follows(a.destination, b.destination, dim):
            return Move(_extend(a.source, b.source, dim), _extend(a.destination, b.destination, dim), a.wire_dtype)
    return None


def _follows(a: View, b: View, dim: int) -> bool:
    at = len(a.offset) - dim
    return (
        b.offset[at] == a.offset[at] + a.extent[at]
        and a.offset[:at] == b.offset[:at]
        and a.offset[at + 1 :] == b.offset[at + 1 :]
        and a.extent[:at] == b.extent[:at]
        and a.extent[at + 1 :] == b.extent[at + 1 :]
    )


def _extend(a: View, b: View, dim: int) -> View:
    at = len(a.extent) - dim
    extent = (*a.extent[:at], a.extent[at] + b.extent[at], *a.extent[at + 1 :])
    return View(a.param, a.offset, extent, a.dtype)


def cut(move: Move, start: int, stop: int, sending: bool) -> list[View]:
    """One side's views of the elements `[start, stop)` of a movement, in order."""
    view = move.side(sending)
    if start == 0 and stop == view.size:
        return [view]
    shape = min(move.source.extent, move.destination.extent, key=len)
    lead = len(view.extent) - len(shape)
    before, origin, ones = view.offset[:lead], view.offset[lead:], (1,) * lead
    return [
        View(view.param, before + tuple(map(add, origin, offset)), ones + extent, view.dtype)
        for offset, extent in run(shape, start, stop)
    ]
