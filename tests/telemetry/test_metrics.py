"""Metrics are whole lines of JSON, an earlier run's folder is kept, and phases are timed on their own."""

import io
import json
import math
import time
from pathlib import Path

import pytest
from rich.console import Console

from hybridrl.telemetry.console import RunConsole
from hybridrl.telemetry.metrics import MetricsWriter, read_metrics, set_aside
from hybridrl.telemetry.plot import plot_curve
from hybridrl.telemetry.timer import Timer


def write(folder: Path, values: list[float]) -> str:
    console = Console(file=io.StringIO(), width=200)
    writer = MetricsWriter(folder, RunConsole(len(values), console))
    for step, value in enumerate(values, 1):
        writer.write(step, {"reward/mean": value, "time/step": 0.5})
    writer.close()
    return console.file.getvalue()


def test_each_step_is_one_json_object_and_one_line_on_the_console(tmp_path: Path) -> None:
    shown = write(tmp_path, [0.25, 0.5])
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.25, "time/step": 0.5},
        {"step": 2, "reward/mean": 0.5, "time/step": 0.5},
    ]
    assert "step 2/2" in shown
    assert "reward 0.5" in shown


def test_values_that_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    write(tmp_path, [math.nan, math.inf])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["reward/mean"] for line in lines] == [None, None]


def test_an_earlier_run_is_set_aside_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert set_aside(folder) is None
    for count in (1, 2):
        write(folder, [float(count)])
        assert set_aside(folder) == tmp_path / f"run.{count}"
    assert read_metrics(tmp_path / "run.1" / "metrics.jsonl")[0]["reward/mean"] == 1.0
    assert read_metrics(tmp_path / "run.2" / "metrics.jsonl")[0]["reward/mean"] == 2.0
    assert not folder.exists()


def test_a_timer_adds_up_repeated_phases_and_starts_anew() -> None:
    timer, start = Timer(), time.perf_counter()
    for _ in range(2):
        with timer("step"), timer("update"):
            time.sleep(0.01)
    taken = timer.take()
    assert 0.02 <= taken["time/update"] <= taken["time/step"] <= time.perf_counter() - start
    assert timer.take() == {}


def test_a_phase_that_raises_is_still_timed() -> None:
    timer = Timer()
    with pytest.raises(RuntimeError), timer("update"):
        raise RuntimeError
    assert "time/update" in timer.take()


def test_a_curve_is_a_png(tmp_path: Path) -> None:
    records = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": None}, {"step": 3, "reward/mean": 0.9}]
    plot_curve(records, "reward/mean", tmp_path / "reward.png", title="reward")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]
