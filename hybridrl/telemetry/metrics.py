"""Where a step's metrics go: one JSON object a line, TensorBoard, and the console."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from hybridrl.files import file_aside
from hybridrl.telemetry.console import RunConsole
from hybridrl.telemetry.tracker import Tracker


def set_aside(folder: Path) -> Path | None:
    """Renames an earlier run's folder to `<folder>.1`, `.2`, … so that a new run loses nothing of it.

    Returns the new name, or None where there was no run in `folder`.
    """
    if not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


class MetricsWriter:
    """Writes each step's metrics to `metrics.jsonl`, to TensorBoard, to the console and to a tracker, if there is
    one. One a run, on rank 0.

    A value that is not finite is written as null in the JSON lines, since JSON has no NaN.
    """

    def __init__(self, folder: Path, console: RunConsole, *, done: int = 0, tracker: Tracker | None = None) -> None:
        """`done` steps are done already: what an earlier process recorded of later ones is dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        self.console = console
        self._tracker = tracker
        if done:
            _keep_steps(folder / "metrics.jsonl", done)
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one step, at once and whole: a reader never sees half a line."""
        record: dict[str, Any] = {"step": step}
        record |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        for key, value in metrics.items():
            self._board.add_scalar(key, value, step)
        if self._tracker is not None:
            self._tracker.write(step, metrics)
        self.console.step(step, metrics)

    def sync(self) -> None:
        """Makes what was written durable: a checkpoint counts on it."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        self._lines.close()
        self._board.close()
        if self._tracker is not None:
            self._tracker.close()


def _keep_steps(path: Path, last: int) -> None:
    """Drops the records after a step, and a line that was cut short. The file is replaced whole."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    with file_aside(path) as aside:
        aside.write_text("".join(f"{line}\n" for line in lines if _step(line) <= last), encoding="utf-8")


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
