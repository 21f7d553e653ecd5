"""Strided regions of storages, and movements between two of them in as few and as plain pieces as possible. Pure.

A reshard is thousands of movements; what they cost beside their bytes is a call each and the walk over their
dimensions. So each is written with the fewest dimensions that both sides allow, and movements that continue each other
in both storages become one, whatever parameters they come from.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """The elements at `offset + Σ index[d] · strides[d]` of a storage, row-major over `sizes`; all in elements."""

    storage: int
    """Names the storage, read as elements of one dtype."""
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Whether the elements lie one after another."""
        return self.strides in ((), (1,))

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.sizes:
            size *= extent
        return size


class Pair(NamedTuple):
    """Elements that go from one region to another, in order."""

    read: Region
    write: Region

    @property
    def dense(self) -> bool:
        """Whether both sides lie without gaps."""
        return self.read.dense and self.write.dense


def simplify(pair: Pair) -> Pair:
    """The same movement with the fewest dimensions; one without gaps has a single one.

    Raises ValueError where the two sides do not have the same shape up to dimensions of 1. A side without gaps takes
    the other's shape, so that a flat buffer goes with anything of its size.
    """
    read, write = (_squeeze(region) for region in pair)
    if read.sizes != write.sizes:
        read, write = _like(read, write), _like(write, read)
    if read.sizes != write.sizes:
        raise ValueError(f"regions of shapes {list(pair.read.sizes)} and {list(pair.write.sizes)} do not correspond")
    sizes: list[int] = []
    strides: list[tuple[int, int]] = []
    for size, own in zip(read.sizes, zip(read.strides, write.strides, strict=True), strict=True):
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], own, strict=True)):
            sizes[-1] *= size
            strides[-1] = own
        else:
            sizes.append(size)
            strides.append(own)
    first, second = (tuple(side) for side in zip(*strides, strict=True)) if strides else ((1,), (1,))
    shape = tuple(sizes) or (1,)
    return Pair(Region(read.storage, read.offset, shape, first), Region(write.storage, write.offset, shape, second))


def merge(pairs: Iterable[Pair]) -> list[Pair]:
    """The same movements in the order of what they write; gapless ones that continue each other are one."""
    merged: list[Pair] = []
    for pair in sorted(map(simplify, pairs), key=lambda pair: (pair.write.storage, pair.write.offset)):
        if merged and pair.dense and merged[-1].dense and _continues(merged[-1], pair):
            sizes = (merged[-1].read.sizes[0] + pair.read.sizes[0],)
            merged[-1] = Pair(*(region._replace(sizes=sizes) for region in merged[-1]))
        else:
            merged.append(pair)
    return merged


def _continues(first: Pair, second: Pair) -> bool:
    return all(a.storage == b.storage and a.offset + a.sizes[0] == b.offset for a, b in zip(first, second, strict=True))


def _squeeze(region: Region) -> Region:
    kept = [(size, stride) for size, stride in zip(region.sizes, region.strides, strict=True) if size != 1]
    return region._replace(sizes=tuple(size for size, _ in kept), strides=tuple(stride for _, stride in kept))


def _like(flat: Region, shaped: Region) -> Region:
    """A gapless region in the shape of another of its size; else as it is."""
    if not flat.dense or flat.size != shaped.size:
        return flat
    strides, stride = [], 1
    for size in reversed(shaped.sizes):
        strides.append(stride)
        stride *= size
    return flat._replace(sizes=shaped.sizes, strides=tuple(reversed(strides)))
