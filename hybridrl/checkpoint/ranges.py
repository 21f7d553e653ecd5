"""Flat ranges of a parameter as boxes: what a shard of the distributed optimizer holds, in the parameter's own axes."""

from collections.abc import Iterator, Sequence
from operator import add

from hybridrl.models.weights import Box, Piece
from hybridrl.reshard.boxes import run


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cuts elements `start` to `stop` (exclusive) of a flattened parameter into boxes, each contiguous when flat.

    Yields the flat index of a box's first element, and the box; in ascending order, at most 2·dims − 1 of them.
    """
    for offset, extent in run(tuple(shape), start, stop):
        box = Box(offset, tuple(map(add, offset, extent)))
        yield start, box
        start += box.size


def part_of_tensor(piece: Piece, box: Box) -> tuple[Box, Box] | None:
    """What of a piece lies in a box of its parameter: its box in the tensor and in the parameter; None for nothing."""
    stop = tuple(o + n for o, n in zip(piece.offset, piece.extent, strict=True))
    common = box.intersect(Box(piece.offset, stop))
    if common is None:
        return None
    lead = len(piece.offset) - len(piece.box.start)
    shift = tuple(start - offset for start, offset in zip(piece.box.start, piece.offset[lead:], strict=True))
    start = tuple(a + d for a, d in zip(common.start[lead:], shift, strict=True))
    return Box(start, tuple(a + n for a, n in zip(start, common.shape[lead:], strict=True))), common
