"""Other processes, as the kernel tells of them."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE_S = 60.0
"""How long a process that has to end by itself may take, on a machine that is busy."""


def runs(pid: int) -> bool:
    """Whether the process runs; one that is dead but not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(mark: str, where: str = "environ") -> list[int]:
    """Ids of the processes whose environment, which those that they start inherit, or `cmdline` holds this text."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / where).read_bytes():
                found.append(int(folder.name))
        except OSError:  # another user's, or gone
            continue
    return found


def left_with(mark: str, where: str = "environ") -> list[int]:
    """Those that are still there after a while."""
    return _after_a_while(lambda: processes_with(mark, where))


def left_of(pids: Iterable[int]) -> list[int]:
    """Those that still run after a while."""
    known = list(pids)
    return _after_a_while(lambda: [pid for pid in known if runs(pid)])


def _after_a_while(find: Callable[[], list[int]]) -> list[int]:
    """What is found until nothing is, or no longer."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
