"""Blocks: pages of host memory that tensors live in for their time on the device, where that is a CPU.

Memory that a process frees for good costs a fault and a clearing for each page when it is taken again, more than the
copy into it. A block gives its pages back lazily instead: the system may have them whenever it is short of memory, and
until then they are written again at the speed of memory that was touched before. While a block is vacant its tensors
have 0 bytes of storage and no storage lies on its pages. A CUDA device needs none of this: its allocator keeps pages.
"""

import mmap
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.memory.pages import LARGE_PAGE, give_lazily, prefer_large_pages, take_again


class _Tenant(NamedTuple):
    """A tensor, and how it lies in the block."""

    tensor: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""


class Block:
    """`nbytes` of host memory, in large pages where it is long enough for them. It has no page before it is written."""

    def __init__(self, nbytes: int) -> None:
        slack = LARGE_PAGE if nbytes >= LARGE_PAGE else 0
        self._map = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._skip = -base % LARGE_PAGE if slack else 0
        self.address = base + self._skip
        """Where it begins; the same for its whole life."""
        self._tenants: list[_Tenant] = []
        prefer_large_pages(self.address, nbytes)
        weakref.finalize(self, take_again, self.address)

    def memory(self) -> Tensor:
        """All of it, uint8, in a storage of its own over the same pages."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.nbytes, offset=self._skip)

    def vacate(self, tensors: Sequence[Tensor]) -> None:
        """Takes the storage from these, which lie here, and gives the pages back; what they held is lost."""
        self._tenants = [_Tenant(t, t.shape, t.stride(), int(t.storage_offset())) for t in tensors]
        for tensor in tensors:
            tensor.data = _hollow(tensor)
        give_lazily(self.address, self.nbytes)

    def occupy(self) -> Tensor:
        """Puts those that have left back where they were, with undefined values; returns the memory."""
        take_again(self.address)
        memory = self.memory()
        for tensor, shape, stride, offset in self._tenants:
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), offset, shape, stride)
        self._tenants = []
        return memory


def _hollow(tensor: Tensor) -> Tensor:
    """One of that shape, with a storage of 0 bytes."""
    found = torch.empty_like(tensor, requires_grad=False)
    found.untyped_storage().resize_(0)
    return found
