"""The benchmark of equal layouts runs, and judges by what must hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.equal_layouts import render
from tests.benchmarks.test_reshard import run


def test_a_run_shares_all_and_moves_nothing(tmp_path: Path) -> None:
    options = ("--ranks", "2", "--syncs", "20", "--model", "small", "--json", f"{tmp_path}/a.json")
    shown = run("benchmarks/equal_layouts.py", *options)
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["shared"]
    assert row["moved_bytes"] == 0
    assert 0 < row["sync_seconds"] <= row["service_seconds"]
    assert "holds  small: shared whole, nothing moved" in shown


def row(model: str, sync: float = 1e-4, **values: Any) -> dict[str, Any]:
    same = {"moved_bytes": 0, "model_bytes": 10**7, "parameters": 40, "shared": True}
    return {"model": model, "sync_seconds": sync, "service_seconds": sync, **same, **values}


@pytest.mark.parametrize(
    ("larger", "failing"),
    [
        (row("larger", 2e-4), 0),
        (row("larger", 2.1e-4), 2),
        (row("larger", 4.5e-4, parameters=400), 0),  # 360 more, on two sides, half a microsecond each: 0.46 ms
        (row("larger", 4.7e-4, parameters=400), 2),
        (row("larger", moved_bytes=1), 1),
        (row("larger", shared=False), 1),
    ],
)
def test_what_must_hold_is_judged(larger: dict[str, Any], failing: int) -> None:
    assert render([row("small"), larger]).count("FAILS") == failing
