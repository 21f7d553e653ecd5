"""Movements in few plain pieces are the same movements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.reshard.regions import Pair, Region, merge, simplify


def places(region):
    """Offsets of the elements in order."""
    found = np.full(region.sizes, region.offset)
    for dim, (size, stride) in enumerate(zip(region.sizes, region.strides, strict=True)):
        found += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(len(region.sizes))])
    return found.reshape(-1).tolist()


def movements(pairs):
    return sorted(
        (p.read.storage, r, p.write.storage, w)
        for p in pairs
        for r, w in zip(places(p.read), places(p.write), strict=True)
    )


def block(storage, shape, box, order):
    """The region of a box of a parameter of this shape, with its dimensions stored in this order."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], stride = stride, stride * shape[dim]
    offset = sum(start * s for (start, _), s in zip(box, strides, strict=True))
    return Region(storage, offset, tuple(b - a for a, b in box), tuple(strides))


@st.composite
def boxes(draw):
    """A pair of boxes of one extent in two parameters of up to four dimensions, one of which may have one more."""
    extent = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sides = []
    for storage in (0, 1):
        lead = draw(st.integers(0, 1))
        spans = [1] * lead + extent
        starts = [draw(st.integers(0, 2)) for _ in spans]
        shape = [a + n + draw(st.integers(0, 2)) for a, n in zip(starts, spans, strict=True)]
        box = [(a, a + n) for a, n in zip(starts, spans, strict=True)]
        sides.append(block(storage, shape, box, draw(st.permutations(range(len(shape))))))
    return Pair(*sides)


@settings(deadline=None)
@given(boxes())
def test_simplifying_keeps_elements_and_order(pair):
    simple = simplify(pair)
    assert places(simple.read) == places(pair.read)
    assert places(simple.write) == places(pair.write)
    assert len(simple.read.sizes) <= max(1, len(pair.read.sizes))


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
def test_neighbours_become_one_in_any_order(lengths, random):
    starts = np.cumsum([0, *lengths]).tolist()
    pairs = [
        Pair(Region(0, 7 + start, (size,), (1,)), Region(1, start, (size,), (1,)))
        for start, size in zip(starts, lengths, strict=False)
    ]
    shuffled = random.sample(pairs, len(pairs))
    assert merge(shuffled) == [Pair(Region(0, 7, (starts[-1],), (1,)), Region(1, 0, (starts[-1],), (1,)))]


@settings(deadline=None)
@given(st.lists(boxes(), max_size=5))
def test_merging_keeps_every_movement(pairs):
    assert movements(merge(pairs)) == movements(pairs)


def test_rows_of_equal_width_are_one_run():
    pair = Pair(block(0, (6, 4), [(1, 3), (0, 4)], (0, 1)), Region(1, 8, (8,), (1,)))
    assert simplify(pair) == Pair(Region(0, 4, (8,), (1,)), Region(1, 8, (8,), (1,)))


def test_columns_keep_two_dimensions_and_give_them_to_the_buffer():
    pair = Pair(block(0, (3, 4), [(0, 3), (1, 3)], (0, 1)), Region(1, 0, (6,), (1,)))
    assert simplify(pair) == Pair(Region(0, 1, (3, 2), (4, 1)), Region(1, 0, (3, 2), (2, 1)))


def test_shapes_that_do_not_correspond_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[3, 2\] do not correspond"):
        simplify(Pair(Region(0, 0, (2, 3), (4, 1)), Region(1, 0, (3, 2), (4, 1))))
