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
from typing import cast

PAGE = mmap.PAGESIZE
LARGE_PAGE = 2 << 20
"""Bytes of a large page, and what its address is a multiple of."""
_MADV_DONTNEED, _MADV_FREE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 8, 14, 23

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED = 8 << 20
"""Allocations of so many bytes get a mapping of their own, see `return_what_is_freed`."""
KEPT = 8 << 20
"""Bytes at the end of the heap that are kept, free, for the next allocation."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_libc.free.argtypes = [ctypes.c_void_p]

_holes: list[int] = []
"""Allocations that keep others out of the heap."""
_lent: dict[int, int] = {}
"""Ranges that were given back lazily, address and bytes: the system has not fetched all of their pages yet."""


def prefer_large_pages(address: int, nbytes: int) -> None:
    """Asks for large pages in the whole pages of this range; on a kernel that has none nothing changes."""
    _advise(address, nbytes, _MADV_HUGEPAGE)


def populate(address: int, nbytes: int) -> None:
    """Gives the range its pages now, contents kept; on a kernel that cannot, they come with the first write."""
    _advise(address, nbytes, _MADV_POPULATE_WRITE)


def give_lazily(address: int, nbytes: int) -> None:
    """Gives the whole pages of this range to the system, which fetches them when it needs them; contents are lost.

    Nothing may write there before `take_again`. On a kernel that cannot do it the pages go at once.
    """
    if _advise(address, nbytes, _MADV_FREE):
        _lent[address] = nbytes
    else:
        _advise(address, nbytes, _MADV_DONTNEED)


def take_again(address: int) -> None:
    """The range that begins there is about to be written, or to be unmapped."""
    _lent.pop(address, None)


def return_what_is_freed() -> None:
    """Has this process give memory back when it is freed, in place of keeping it for later allocations.

    glibc raises the size from which an allocation gets a mapping of its own with each one that is freed, up to 32 MiB,
    and looks for room in the heap first, whatever the size. Storages that come and go with each phase then lie between
    others, and what they leave stays resident, or not, by chance. So the size is fixed, and the heap's holes of that
    size are taken, their pages given back: the resident set is then the same in each cycle. Another allocator, and the
    holes of a glibc before 2.33, are left alone.
    """
    for option, value in ((_M_MMAP_THRESHOLD, MAPPED), (_M_TRIM_THRESHOLD, KEPT)):
        _libc.mallopt(option, value)
    while _holes:
        _libc.free(_holes.pop())
    _libc.malloc_trim(ctypes.c_size_t(0))
    if not hasattr(_libc, "mallinfo2"):
        return
    before = _heap()
    for _ in range(before.fordblks // MAPPED):
        _holes.append(_libc.malloc(MAPPED))  # never written to
        if _heap().hblks > before.hblks:
            _libc.free(_holes.pop())
            break


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _heap() -> _Heap:
    """What glibc says of its heap: `fordblks` free bytes in it, and `hblks` allocations with a mapping of their own."""
    _libc.mallinfo2.restype = _Heap
    return cast("_Heap", _libc.mallinfo2())


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


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice."""
    first, length = _whole_pages(address, nbytes)
    return length <= 0 or _libc.madvise(first, length, advice) == 0


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Where the whole pages of a range begin, and their bytes."""
    first = -(-address // PAGE) * PAGE
    return first, (address + nbytes) // PAGE * PAGE - first


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
    """Resident set of this process, without the pages that the system may fetch at any time (`give_lazily`)."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    return resident - sum(_present_bytes(*_whole_pages(*lent)) for lent in list(_lent.items()))


def _present_bytes(address: int, nbytes: int) -> int:
    """Bytes of these whole pages that are in memory."""
    if nbytes <= 0:
        return 0
    flags = ctypes.create_string_buffer(nbytes // PAGE)
    if _libc.mincore(address, nbytes, flags):
        raise OSError(ctypes.get_errno(), f"mincore of {nbytes} bytes at {address:#x} failed")
    return flags.raw.count(b"\x01") * PAGE


def disk_bytes(folder: Path) -> int:
    """Free bytes of the file system that `folder`, or its nearest existing parent, is on."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
