"""Pages of host memory: large ones, and how much there is.

Fresh memory of a CPU costs a page fault each 4 KiB, more than the copy into it. Large pages make that cost vanish, so a
tensor that comes back comes as fast as into memory that was touched before.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

PAGE = mmap.PAGESIZE
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer_large_pages(address: int, nbytes: int) -> None:
    """Asks for large pages in the whole pages of this range; on a kernel that has none nothing changes."""
    _advise(address, nbytes, _MADV_HUGEPAGE)


def populate(address: int, nbytes: int) -> None:
    """Gives the range its pages now, contents kept; on a kernel that cannot, they come with the first write."""
    _advise(address, nbytes, _MADV_POPULATE_WRITE)


def populate_beside(ranges: Sequence[tuple[int, int]]) -> threading.Thread:
    """Gives these (address, bytes) their pages in a thread of its own, large ones where there are: ahead of a copy."""

    def run() -> None:
        for address, nbytes in ranges:
            populate(address, nbytes)

    for address, nbytes in ranges:
        prefer_large_pages(address, nbytes)
    thread = threading.Thread(target=run, name="hybridrl-pages", daemon=True)
    thread.start()
    return thread


def _advise(address: int, nbytes: int, advice: int) -> None:
    first = -(-address // PAGE) * PAGE
    length = (address + nbytes) // PAGE * PAGE - first
    if length > 0:
        _libc.madvise(first, length, advice)


def available_bytes() -> int:
    """Host memory that can still be taken: what the kernel says, within the limit of the control group."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return free
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])
    return min(free, int(text) - used)


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def disk_bytes(folder: Path) -> int:
    """Free bytes of the file system that `folder`, or its nearest existing parent, is on."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
