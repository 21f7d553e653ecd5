"""Address-stable memory: address space reserved once, of which pages are taken and given back by range.

    region = Region(nbytes, "cuda")                      # no page is taken yet
    weights = region.take((4096, 4096), torch.bfloat16)  # a tensor at an address that never changes
    region.commit()                                      # all pages
    region.release(start, stop)                          # some of them go back to the device, at once

Tensors, views compiled over them and captured graphs go on to be valid: they read and write whatever pages lie at
their addresses. What a page holds after it was given back and taken again is undefined. On a CPU the pages are those of
an anonymous mapping, on a GPU of CUDA's virtual memory (`hybridrl.memory.cuda_pages`).
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from hybridrl.reshard.storages import span

ALIGNMENT = 256
"""Tensors begin at multiples of this, in bytes, as those of CUDA's allocator do."""
_NO_RESERVE = 0x4000  # MAP_NORESERVE: address space costs nothing until it is written to


class RegionError(RuntimeError):
    """A use of a region that its state does not allow."""


class Pages(Protocol):
    """Address space on a device, and the pages in it. Offsets and lengths are whole pages."""

    page_bytes: int
    base: torch.Tensor
    """uint8, all of the address space."""

    def take(self, start: int, stop: int) -> None:
        """Puts pages under a range that has none. Raises MemoryError, with nothing taken, where there are too few."""

    def give(self, start: int, stop: int) -> None:
        """Gives the pages under a range back, once all that the device was asked to do with them is done."""

    def trim(self) -> None:
        """Gives back what was kept for the next `take`."""

    def close(self) -> None:
        """Gives everything back. No tensor of the region may be used afterwards."""


class Region:
    """Reserved address space for tensors of one device.

    Args:
        nbytes: at least so much, rounded up to whole pages.
        device: a CPU or a CUDA device.
        pages: in place of the device's own.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu", *, pages: Pages | None = None) -> None:
        if nbytes < 1:
            raise RegionError(f"a region of {nbytes} bytes: expected at least 1")
        self._pages = pages or make_pages(nbytes, torch.device(device))
        self.page_bytes = self._pages.page_bytes
        """What `commit` and `release` work on: every range of theirs is of whole pages."""
        self.nbytes = self._pages.base.numel()
        """Bytes of address space."""
        self.address: int = self._pages.base.data_ptr()
        self._held = np.zeros(self.nbytes // self.page_bytes, np.bool_)
        self._used = 0

    @property
    def committed_bytes(self) -> int:
        """Bytes of the pages that the region has now."""
        return int(np.count_nonzero(self._held)) * self.page_bytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the next bytes of the region that are nobody's. Its values are what the pages hold.

        Raises RegionError where too few bytes are left.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes - self._used:
            raise RegionError(
                f"a region of {self.nbytes} bytes has {self.nbytes - self._used} left, and a tensor of {list(shape)} "
                f"{dtype} takes {nbytes}"
            )
        start = self._used
        self._used = min(start + padded(nbytes), self.nbytes)
        return self._pages.base[start : start + nbytes].view(dtype).view(tuple(shape))

    def commit(self, start: int = 0, stop: int | None = None) -> None:
        """Sees to it that every byte of the range has a page; those that are there stay as they are.

        Raises RegionError for a range that is not of whole pages, and where the device has too few left.
        """
        first, last = self._range(start, stop)
        for a, b in _runs(~self._held[first:last], first):
            try:
                self._pages.take(a * self.page_bytes, b * self.page_bytes)
            except MemoryError as error:
                raise RegionError(
                    f"no memory for {(b - a) * self.page_bytes} bytes more of a region that has "
                    f"{self.committed_bytes} of {self.nbytes}: {error}"
                ) from error
            self._held[a:b] = True

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Gives back every page of the range; what it held is lost.

        On a GPU this waits for what was launched before on the current stream. Raises RegionError, with nothing given
        back, for a range that is not of whole pages, or of which a page was given back before.
        """
        first, last = self._range(start, stop)
        gone = np.flatnonzero(~self._held[first:last])
        if len(gone):
            at = (first + int(gone[0])) * self.page_bytes
            raise RegionError(f"release of bytes {start} to {stop} of a region: the page at {at} is not there")
        self._held[first:last] = False
        if first < last:
            self._pages.give(first * self.page_bytes, last * self.page_bytes)

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raises RegionError where any byte of the tensor has been given back, or is not the region's at all."""
        start, stop = span(tensor)
        if not self.address <= start <= stop <= self.address + self.nbytes:
            raise RegionError(f"{name} lies at {start:#x}, outside of the region at {self.address:#x}")
        first = (start - self.address) // self.page_bytes
        last = -(-(stop - self.address) // self.page_bytes)
        gone = int(np.count_nonzero(~self._held[first:last]))
        if gone:
            raise RegionError(
                f"{name}: {gone} of the {last - first} pages that it lies on have been given back; it holds no values"
            )

    def trim(self) -> None:
        """Gives the device what was kept to be taken again soon (see `cuda_pages.Pool`)."""
        self._pages.trim()

    def close(self) -> None:
        """Gives back all pages and the address space. No tensor of the region may be used afterwards."""
        self._held[:] = False
        self._pages.close()

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        """Pages of a range of bytes."""
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes or start % self.page_bytes or stop % self.page_bytes:
            raise RegionError(
                f"bytes {start} to {stop} of a region of {self.nbytes}: expected whole pages of {self.page_bytes} in it"
            )
        return start // self.page_bytes, stop // self.page_bytes


def padded(nbytes: int) -> int:
    """What a tensor of so many bytes takes of a region."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def region_bytes(sizes: Iterable[int]) -> int:
    """What a region needs for tensors of these bytes."""
    return max(1, sum(map(padded, sizes)))


def make_pages(nbytes: int, device: torch.device) -> Pages:
    """Pages of that device. Raises RegionError for one of another kind, and what its driver refuses."""
    if device.type == "cpu":
        return HostPages(nbytes)
    if device.type == "cuda":
        from hybridrl.memory.cuda_pages import CudaPages

        return CudaPages(nbytes, device)
    raise RegionError(f"no region can be made on {device}: expected cpu or cuda")


class HostPages:
    """Pages of an anonymous private mapping. The kernel puts one down at the first write to it, full of zeros."""

    def __init__(self, nbytes: int) -> None:
        self.page_bytes = mmap.PAGESIZE
        whole = -(-nbytes // self.page_bytes) * self.page_bytes
        self._map = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would put down more than was written to
        self.base = torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self, start: int, stop: int) -> None:
        """Nothing: pages come with the first write."""

    def give(self, start: int, stop: int) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def trim(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self.give(0, len(self._map))
        self.base = torch.empty(0, dtype=torch.uint8)  # the mapping goes with the last tensor


def _runs(wanted: np.ndarray, first: int) -> list[tuple[int, int]]:
    """Ranges of neighbouring True entries, counted from `first`."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)) + first
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
