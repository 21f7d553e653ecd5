"""The arena: one block of host memory a rank, taken once, that what leaves the device is kept in.

It is memory of the process (page-locked where CUDA is, so that copies run at the link's speed and beside the
computation), or a file that is mapped. Its address never changes, and nothing is allocated in a step. Sections are cut
off it at the start, one an owner; what they hold is their owners' affair.
"""

import mmap
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.memory.pages import PAGE, available_bytes, disk_bytes, populate

PART = 1 << 30
"""Bytes that are page-locked or populated in one call."""


class ArenaError(RuntimeError):
    """Memory that the arena needs is not there; says how much is needed and how much there is."""


class Arena:
    """A block of `nbytes`, rounded up to pages.

    Args:
        nbytes: of all sections together, each rounded up to whole pages (`section_bytes`).
        pin: page-lock it for CUDA, part after part in the background; the first `section` waits for the end of it.
        file: keep it in this file, which is removed at once and so goes with the process. A file is not page-locked.

    Raises ArenaError where the memory or the disk has too little room.
    """

    def __init__(self, nbytes: int, *, pin: bool = False, file: Path | None = None) -> None:
        self.nbytes = section_bytes(max(nbytes, 1))
        self._map = _map_file(file, self.nbytes) if file is not None else _map_memory(self.nbytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pin = pin and file is None
        self._pinned = 0
        self._problem: str | None = None
        self._sections: dict[str, Tensor] = {}
        self._used = 0
        self._ready = threading.Thread(target=self._prepare, name="hybridrl-arena", daemon=True)
        self._ready.start()

    @property
    def address(self) -> int:
        """Where the block begins; the same for its whole life."""
        return self.memory.data_ptr()

    def section(self, name: str, nbytes: int) -> Tensor:
        """A uint8 tensor over a part of the block that is the owner's alone.

        Raises ArenaError where the block has too little left, and ValueError where the name has a section already.
        """
        self.wait()
        if name in self._sections:
            raise ValueError(f"the arena has a section {name} already, of {self._sections[name].numel()} bytes")
        end = self._used + section_bytes(nbytes)
        if end > self.nbytes:
            raise ArenaError(
                f"the arena has {self.nbytes - self._used} of {self.nbytes} bytes left, {name} needs {nbytes}: "
                f"{ {key: section.numel() for key, section in self._sections.items()} } have the rest"
            )
        self._sections[name] = self.memory[self._used : self._used + nbytes]
        self._used = end
        return self._sections[name]

    def wait(self) -> None:
        """Until all pages are there and locked. Raises ArenaError where they cannot be."""
        self._ready.join()
        if self._problem is not None:
            raise ArenaError(self._problem)

    def close(self) -> None:
        """Unlocks the pages. The memory goes when no tensor is left over it."""
        self._ready.join()
        for start in range(0, self._pinned, PART):
            torch.cuda.cudart().cudaHostUnregister(self.address + start)
        self._pinned = 0
        self._sections = {}

    def _prepare(self) -> None:
        for start in range(0, self.nbytes, PART):
            length = min(PART, self.nbytes - start)
            if not self._pin:
                populate(self.address + start, length)
                continue
            status = torch.cuda.cudart().cudaHostRegister(self.address + start, length, 0)
            if int(status) != 0:
                self._problem = (
                    f"CUDA could not lock {length} bytes of host memory for the arena (error {int(status)}), after "
                    f"{self._pinned} of {self.nbytes}: raise the limit of locked memory (ulimit -l), or set "
                    "memory.arena=disk"
                )
                return
            self._pinned += length


def section_bytes(nbytes: int) -> int:
    """What a section of so many bytes takes: whole pages."""
    return -(-nbytes // PAGE) * PAGE


def check_room(host: int, disk: int, folder: Path) -> None:
    """Raises ArenaError, on all ranks, where the ranks of a machine together want more than it has. Collective.

    `host` and `disk` are the bytes that this rank will take of each, `folder` where its file will be.
    """
    found: list[tuple[str, int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), host, disk))
    machine = socket.gethostname()
    together = [entry for entry in found if entry is not None and entry[0] == machine]
    problems: list[str] = []
    for what, wanted, there, advice in (
        ("host memory", sum(e[1] for e in together), available_bytes(), "set memory.arena=disk, or offload less"),
        ("disk", sum(e[2] for e in together), disk_bytes(folder), f"make room in {folder} or set memory.arena_dir"),
    ):
        if wanted > there:
            problems.append(
                f"{machine}: {len(together)} ranks need {wanted / 2**30:.2f} GiB of {what} for what leaves their "
                f"devices, {there / 2**30:.2f} GiB are available: {advice}"
            )
    told: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problems)
    if every := sorted({text for part in told for text in part or ()}):
        raise ArenaError("; ".join(every))


class Arenas:
    """This rank's arenas, by place (`host`, `disk`): no place is taken that nothing goes to.

    `wanted` holds, for each place, the bytes of each owner. Raises ArenaError on all ranks. Collective.
    """

    def __init__(self, wanted: Mapping[str, Mapping[str, int]], folder: Path, rank: int, *, pin: bool) -> None:
        self._folder = folder
        totals = {place: sum(map(section_bytes, sizes.values())) for place, sizes in wanted.items() if sizes}
        check_room(totals.get("host", 0), totals.get("disk", 0), folder)
        self._arenas = {
            place: Arena(total, pin=pin, file=folder / f"rank{rank}.arena" if place == "disk" else None)
            for place, total in totals.items()
        }

    def section(self, place: str, name: str, nbytes: int) -> Tensor:
        """See `Arena.section`."""
        return self._arenas[place].section(name, nbytes)

    @property
    def addresses(self) -> dict[str, int]:
        """Where each begins."""
        return {place: arena.address for place, arena in self._arenas.items()}

    @property
    def nbytes(self) -> dict[str, int]:
        """How large each is."""
        return {place: arena.nbytes for place, arena in self._arenas.items()}

    def close(self) -> None:
        """See `Arena.close`. The folder goes if it is empty."""
        with suppress(OSError):  # other ranks' files, or another rank was first
            self._folder.rmdir()
        for arena in self._arenas.values():
            arena.close()


def _map_memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_file(path: Path, nbytes: int) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as file:
        path.unlink()
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise ArenaError(
                f"{path}: no room for {nbytes} bytes ({error.strerror}), {disk_bytes(path.parent)} are free: make room "
                "or set memory.arena_dir"
            ) from error
        return mmap.mmap(file.fileno(), nbytes)
