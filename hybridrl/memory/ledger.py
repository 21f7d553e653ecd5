"""The ledger: every byte of the device has an owner.

Owners are asked for their tensors each time, and storages are counted, so that nothing is counted twice: what two
owners share belongs to the one that was named first. The same count runs on a CPU. What the allocator says beyond it is
`unowned`: activations, communication buffers, fragmentation, or a leak.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.memory.pages import resident_bytes

Holdings = Callable[[], Iterable[Tensor] | int]
"""An owner's tensors now; or its bytes on this device, where they are in another process."""


@dataclass(frozen=True)
class Entry:
    """The device at one moment. All sizes in bytes."""

    event: str
    seconds: float
    """Since the ledger was made."""
    owners: Mapping[str, int]
    used: int
    """What the allocator of a GPU has given out; on a CPU the resident set of the process, the host's parts and all,
    without the pages that the system may fetch at any time."""
    peak: int
    """The most of `used` since the entry before; on a CPU with the pages that the system may fetch."""
    outside: int = 0
    """What a GPU has given out beside its allocator: buffers of NCCL's communicators, the CUDA context, other processes
    on it. 0 on a CPU."""

    @property
    def total(self) -> int:
        """Bytes that have an owner."""
        return sum(self.owners.values())

    @property
    def unowned(self) -> int:
        """Bytes in use that nobody owns. On a CPU most of them are the program itself: look at their growth."""
        return self.used - self.total


class Ledger:
    """Who holds how much of `device`. Owners are counted in the order in which they were named."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entries: list[Entry] = []
        """Since the last `take`."""
        self.highest = 0
        """The most bytes in use so far."""
        self._owners: dict[str, Holdings] = {}
        self._started = time.perf_counter()
        self._first_unowned: dict[str, int] = {}
        self.growth = 0
        """Unowned bytes of the last entry above those of the first entry of the same event."""

    def own(self, owner: str, holdings: Holdings) -> None:
        """Names an owner. Raises ValueError for a name that is taken."""
        if owner in self._owners:
            raise ValueError(f"the ledger has an owner {owner} already")
        self._owners[owner] = holdings

    def count(self) -> dict[str, int]:
        """Bytes by owner, now. Tensors on other devices are nobody's."""
        seen: set[int] = set()
        counted = {}
        for owner, holdings in self._owners.items():
            held = holdings()
            counted[owner] = held if isinstance(held, int) else self._new_bytes(held, seen)
        return counted

    def mark(self, event: str) -> Entry:
        """Adds an entry."""
        used, peak = used_bytes(self.device), take_peak(self.device)
        entry = Entry(
            event, time.perf_counter() - self._started, self.count(), used, max(used, peak), outside_bytes(self.device)
        )
        self.highest = max(self.highest, entry.peak)
        self.growth = entry.unowned - self._first_unowned.setdefault(event, entry.unowned)
        self.entries.append(entry)
        return entry

    def take(self) -> list[Entry]:
        """The entries since the last call."""
        taken, self.entries = self.entries, []
        return taken

    def _new_bytes(self, tensors: Iterable[Tensor], seen: set[int]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self.device.type and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def used_bytes(device: torch.device) -> int:
    """Bytes that a GPU's allocator has given out; on a CPU the resident set of the process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def outside_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU that its allocator knows nothing of; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def take_peak(device: torch.device) -> int:
    """The most of `used_bytes` since the last call."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    with suppress(PermissionError):  # where the kernel allows it, it begins a new peak; else this is the process's
        Path("/proc/self/clear_refs").write_text("5")
    return peak
