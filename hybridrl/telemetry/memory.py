"""Peak memory of this process, and the trace of who held how much in each phase."""

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrl.files import file_aside
from hybridrl.memory.ledger import Entry
from hybridrl.telemetry.plot import plt

TRACE, PLOT = "memory.jsonl", "memory.png"
PLOTTED_STEPS = 3
"""The plot shows so many steps, the last ones: each is a dozen bars."""


def peak_bytes() -> int:
    """Peak device memory where CUDA is used, else the peak resident set of the process; bytes."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_trace(folder: Path, step: int, entries: Sequence[Entry]) -> None:
    """Appends a line an entry to the folder's `memory.jsonl`: step, event, seconds, and bytes by owner and in all.

    `outside` are bytes of the device that its allocator knows nothing of, such as communicator buffers.
    """
    with (folder / TRACE).open("a", encoding="utf-8") as lines:
        for entry in entries:
            record = {
                "step": step,
                "event": entry.event,
                "seconds": entry.seconds,
                "owners": dict(entry.owners),
                "total": entry.total,
                "used": entry.used,
                "unowned": entry.unowned,
                "peak": entry.peak,
                "outside": entry.outside,
            }
            lines.write(json.dumps(record) + "\n")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The records of a `memory.jsonl`, in order."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def plot_trace(folder: Path) -> None:
    """Draws the last steps of the folder's trace as stacked bars, one a change of phase, to `memory.png`."""
    records = read_trace(folder / TRACE) if (folder / TRACE).exists() else []
    if not records:
        return
    last = records[-1]["step"]
    shown = [record for record in records if record["step"] > last - PLOTTED_STEPS]
    figure, axes = plt.subplots(figsize=(max(6.0, 0.7 * len(shown)), 5), dpi=120)
    bottom = [0.0] * len(shown)
    for owner in shown[0]["owners"]:
        heights = [record["owners"][owner] / 2**20 for record in shown]
        axes.bar(range(len(shown)), heights, bottom=bottom, width=0.85, label=owner)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(shown)), [f"{r['step']} {r['event']}" for r in shown], rotation=60, ha="right")
    axes.set_ylabel("MiB on the device")
    axes.set_title("memory by owner, at each change of phase")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    with file_aside(folder / PLOT) as aside:
        figure.savefig(aside, format="png")
    plt.close(figure)
