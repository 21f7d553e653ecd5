"""Algebra of boxes: refining overlaps, subtracting, cutting a box at an element, proving that boxes are disjoint."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod

from hybridrl.models.weights import Box


def refine(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint cells in row-major order whose unions are the boxes: no cell crosses the border of a box.

    Boxes that are disjoint or equal come back as they are, each once.
    """
    distinct = sorted(set(boxes), key=lambda box: (box.start, box.stop))
    if overlapping(distinct) is None:
        return distinct
    rank = len(distinct[0].start)
    borders = [sorted({box.start[d] for box in distinct} | {box.stop[d] for box in distinct}) for d in range(rank)]
    spans = product(*(pairwise(places) for places in borders))
    cells = (Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)) for ends in spans)
    return [cell for cell in cells if any(box.contains(cell) for box in distinct)]


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, or None. Sweeps along the first dimension."""
    ordered = sorted(boxes, key=lambda box: box.start)
    active: list[Box] = []
    for box in ordered:
        if not box.start:
            if active:
                return active[0], box
        else:
            active = [other for other in active if other.stop[0] > box.start[0]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


def subtract(box: Box, other: Box) -> Iterator[Box]:
    """Disjoint boxes that make up `box` without `other`."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    rest = box
    for dim, (start, stop) in enumerate(zip(common.start, common.stop, strict=True)):
        if rest.start[dim] < start:
            yield rest.narrow(dim, rest.start[dim], start)
        if stop < rest.stop[dim]:
            yield rest.narrow(dim, stop, rest.stop[dim])
        rest = rest.narrow(dim, start, stop)


def complement(box: Box, covered: Iterable[Box]) -> list[Box]:
    """Disjoint boxes of `box` that none of the (disjoint) covered boxes reaches."""
    rest = [box]
    for one in covered:
        rest = [part for piece in rest for part in subtract(piece, one)]
    return rest


def run(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and extents of disjoint boxes that hold the elements `[start, stop)` of an array of this shape, in its
    row-major order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    inner = shape[1:]
    row = prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(inner, first, head, tail)
    found = _in_row(inner, first, head, row) if head else []
    whole = first + (head > 0)
    if whole < last:
        found.append(((whole, *(0,) * len(inner)), (last - whole, *inner)))
    return found + _in_row(inner, last, 0, tail)


def _in_row(inner: tuple[int, ...], index: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((index, *offset), (1, *extent)) for offset, extent in run(inner, start, stop)]


def stripe(box: Box, count: int, index: int) -> Box | None:
    """The `index`-th of `count` almost equal slices along the first dimension that has so many elements, else along
    the longest; None where that slice is empty."""
    shape = box.shape
    if not shape:
        return box if index == 0 else None
    dim = next((d for d, extent in enumerate(shape) if extent >= count), max(range(len(shape)), key=shape.__getitem__))
    start, stop = (box.start[dim] + shape[dim] * i // count for i in (index, index + 1))
    return box.narrow(dim, start, stop) if start < stop else None
