"""Flat ranges of a parameter as boxes: what a shard of the distributed optimizer holds, in the parameter's own axes."""

from collections.abc import Iterator, Sequence
from math import prod

from hybridrl.models.weights import Box, Piece


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cuts elements `start` to `stop` (exclusive) of a flattened parameter into boxes, each contiguous when flat.

    Yields the flat index of a box's first element, and the box; in ascending order, at most 2·dims − 1 of them.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield start, Box((start,), (stop,)) if shape else Box((), ())
        return
    inner = shape[1:]
    row = prod(inner)
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _within(inner, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within(inner, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield first * row, Box((first, *(0 for _ in inner)), (last, *inner))
    yield from _within(inner, last, 0, stop - last * row)


def _within(inner: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The same for a part of one row, in the dimensions of the whole."""
    for flat, box in boxes_of_range(inner, start, stop):
        yield index * prod(inner) + flat, Box((index, *box.start), (index + 1, *box.stop))


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
