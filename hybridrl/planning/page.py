"""A dry run as one self-contained HTML file: memory by phase, the rank map, the traffic, the timeline."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.files import file_aside
from hybridrl.planning.advice import Advice
from hybridrl.planning.estimate import Estimate
from hybridrl.planning.hardware import GIB
from hybridrl.planning.report import render, shown, verdict
from hybridrl.planning.search import Choice

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto } img { max-width: 100% }
table { border-collapse: collapse } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left }
.yes { color: #176d35 } .no { color: #a4262c }
"""
SHOWN_RANKS = 512


def write_page(path: Path, title: str, found: Estimate, advice: Advice | None, choices: Sequence[Choice]) -> None:
    """Writes the page aside and renames it."""
    figures = {"Memory by phase": _memory, "Ranks": _ranks, "Seconds of a step": _timeline}
    if found.reshard is not None:
        figures["Bytes between ranks at a switch to rollout"] = _traffic
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{"yes" if found.fits else "no"}">{html.escape(verdict(found, advice))}</p>',
        *(f'<h2>{name}</h2><img alt="{name}" src="{_png(draw, found)}">' for name, draw in figures.items()),
    ]
    if choices:
        rows = "".join(
            f"<tr><td>{one.estimate.step.total:.1f}</td><td><code>{html.escape(shown(one.changes))}</code></td></tr>"
            for one in choices
        )
        body.append(f"<h2>Layouts that fit</h2><table><tr><th>seconds a step</th><th>overrides</th></tr>{rows}</table>")
    body.append(f"<h2>All figures</h2><pre>{html.escape(render(found, advice, ()))}</pre>")
    page = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    with file_aside(path) as aside:
        aside.write_text(page + "\n".join(body) + "\n", encoding="utf-8")


def _png(draw: Any, found: Estimate) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    draw(figure.subplots(), found)
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode("ascii")


def _memory(axes: Any, found: Estimate) -> None:
    phases = found.memory.phases
    base = np.zeros(len(phases))
    for owner in dict.fromkeys(owner for phase in phases.values() for owner in phase):
        sizes = np.array([phase.get(owner, 0) / GIB for phase in phases.values()])
        axes.bar(list(phases), sizes, bottom=base, label=owner, width=0.6)
        base += sizes
    axes.axhline(found.hardware.memory_bytes / GIB, color="#a4262c", linestyle="--", label="device")
    axes.set_ylabel("GiB of the fullest device")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _ranks(axes: Any, found: Estimate) -> None:
    """Each rank's pipeline stage in training, beside its replica in the rollout."""
    sizes, engine = found.layouts.sizes, found.layouts.engine_sizes
    shown_ranks = range(min(found.layouts.world, SHOWN_RANKS))
    rows = [
        [sizes.coordinates(rank).tp for rank in shown_ranks],
        [sizes.coordinates(rank).ep for rank in shown_ranks],
        [sizes.coordinates(rank).pp for rank in shown_ranks],
        [rank // engine.tp for rank in shown_ranks],
    ]
    scaled = [[value / max(1, *row) for value in row] if len(row) > 1 else row for row in rows]
    axes.imshow(scaled, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_yticks(range(4), ["train tp", "train ep", "train pp", "rollout replica"])
    axes.set_xlabel("rank")
    per_node = found.config.trainer.ranks_per_node
    for edge in range(per_node, len(shown_ranks), per_node):
        axes.axvline(edge - 0.5, color="white", linewidth=0.8)


def _traffic(axes: Any, found: Estimate) -> None:
    assert found.reshard is not None
    image = axes.imshow(found.reshard.there.traffic / 1e9, cmap="viridis", interpolation="nearest")
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.figure.colorbar(image, ax=axes, label="GB")


def _timeline(axes: Any, found: Estimate) -> None:
    start = 0.0
    for name, seconds in asdict(found.step).items():
        axes.barh([0], [seconds], left=[start], label=f"{name} {seconds:.1f} s", height=0.4)
        start += seconds
    axes.set_yticks([])
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5)
