"""Peak memory of a stretch of a program above what it had at the start: the device's, or the process's on Linux."""

import re
from pathlib import Path

import torch


class Peak:
    """Starts counting when made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of resident memory starts anew
            self._before = _status("VmRSS")

    def bytes(self) -> int:
        """The most above the start so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
