"""What a process gives back to the system, counted by the kernel."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridrl.memory.pages import PAGE, give_lazily, resident_bytes, take_again

MIB = 2**20


def statm_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_pages_that_were_given_back_lazily_do_not_count_until_they_are_taken_again() -> None:
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    block.fill_(7)
    address, before = block.data_ptr(), resident_bytes()
    assert before == pytest.approx(statm_bytes(), abs=MIB)
    give_lazily(address + 100, 32 * MIB)  # not whole pages: what is beside them stays
    gone = statm_bytes() - resident_bytes()  # some may have been fetched at once
    assert gone <= 32 * MIB
    assert resident_bytes() <= before - 32 * MIB + 8 * MIB
    assert int(block[:100].sum()) == 700
    take_again(address + 100)
    block[: 33 * MIB] = 3
    assert resident_bytes() == pytest.approx(before, abs=8 * MIB)
    assert resident_bytes() == pytest.approx(statm_bytes(), abs=MIB)
    assert int(block[-1]) == 7


HEAP = """
import sys
import ctypes
from hybridrl.memory.pages import resident_bytes, return_what_is_freed
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def take(size):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    return place
libc.free(take(30 << 20))  # from here on the allocator keeps what is smaller
held = [take(12 << 20) for _ in range(6)]
pin = take(100 << 10)  # what lies behind them in the heap
for place in held:
    libc.free(place)
before = resident_bytes()
if sys.argv[1] == "return":
    for _ in range(3):
        return_what_is_freed()
    before = resident_bytes()
for size in (40, 30, 20):
    libc.free(take(size << 20))
    held = [take(12 << 20) for _ in range(7)]
    pin = take(100 << 10)
    most = resident_bytes()
    for place in held:
        libc.free(place)
print(resident_bytes() - before, most - resident_bytes())
"""


def test_freed_memory_goes_back_to_the_system_whatever_was_freed_before() -> None:
    def run(how: str) -> tuple[int, int]:
        command = [sys.executable, "-c", HEAP, how]
        # With the allocator's own settings, and without another allocator.
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
        kept, freed = subprocess.run(command, check=True, capture_output=True, text=True, env=ours).stdout.split()
        return int(kept), int(freed)

    kept, freed = run("return")
    assert kept < 8 * MIB
    assert freed == pytest.approx(84 * MIB, abs=8 * MIB)
    _, freed = run("keep")
    assert freed < 40 * MIB  # what it is good for: else this test shows nothing


def test_a_range_without_a_whole_page_is_nothing_to_give() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    give_lazily(memory.data_ptr(), 100)
    assert resident_bytes() == pytest.approx(statm_bytes(), abs=MIB)
    take_again(memory.data_ptr())
