"""Curves of a run's metrics as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hybridrl.files import file_aside


def plot_curve(records: Sequence[Mapping[str, Any]], key: str, path: Path, *, title: str, window: int = 5) -> None:
    """Draws `key` over the steps, with its mean over the last `window` steps, and writes a PNG aside and renames it."""
    steps = [record["step"] for record in records if record.get(key) is not None]
    values = [record[key] for record in records if record.get(key) is not None]
    means = [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, values, color="#9ec5e8", linewidth=1, label="step")
    axes.plot(steps, means, color="#1f5f99", linewidth=2, label=f"mean of the last {window}")
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    with file_aside(path) as aside:
        figure.savefig(aside, format="png")
    plt.close(figure)
