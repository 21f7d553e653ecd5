"""What the kernel says of this process's memory, page by page."""

import mmap
import struct
from pathlib import Path

PRESENT = 1 << 63
"""Of an entry of /proc/self/pagemap: the page is in memory."""


def present_bytes(address: int, nbytes: int) -> int:
    """Bytes of the pages of this range that are in memory, whatever lies beside it."""
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * (last - first))
    return mmap.PAGESIZE * sum(bool(entry & PRESENT) for (entry,) in struct.iter_unpack("=Q", entries))
