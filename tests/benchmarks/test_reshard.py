"""The reshard benchmarks run, measure what they say and judge by what must hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reshard_cases import CASES, SMOKE
from benchmarks.reshard_table import judge, render

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "case",
    "method",
    "seconds_median",
    "bytes_received_max",
    "lower_bound_max",
    "gb_per_s",
    "alltoall_gb_per_s",
    "copy_seconds",
    "staging_peak_bytes",
    "bucket_bytes",
}


def run(*command: str) -> str:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=280
    ).stdout


def test_the_smoke_run_writes_every_method_of_its_cases(tmp_path: Path) -> None:
    shown = run(
        "benchmarks/reshard.py", "--smoke", "--syncs", "1", "--case", "headline", "--json", f"{tmp_path}/a.json"
    )
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [row["method"] for row in rows] == ["golden", "gather", "plan", "megatron"]
    for row in rows[:3]:
        assert row.keys() >= KEYS
        assert row["seconds_median"] > 0
    plan, gather = rows[2], rows[1]
    assert plan["bytes_received_max"] == plan["lower_bound_max"] < gather["bytes_received_max"] / 10
    assert 0 < plan["staging_peak_bytes"] <= 2 * plan["bucket_bytes"]
    assert "core.resharding maps parameters one to one by name" in rows[3]["absent"]
    assert "headline" in shown


def row(method: str, **values: Any) -> dict[str, Any]:
    return {
        "case": "one",
        "method": method,
        "seconds_median": 0.1,
        "bytes_received_max": 2**25,
        "lower_bound_max": 2**25,
        "gb_per_s": 0.8,
        "alltoall_gb_per_s": 1.0,
        "copy_seconds": 0.0,
        "staging_peak_bytes": 2**21,
        "bucket_bytes": 2**20,
        "peak_bytes": 0,
        **values,
    }


@pytest.mark.parametrize(
    ("values", "failing"),
    [
        ({}, []),
        ({"bytes_received_max": 2**25 + 1}, ["lower bound"]),
        ({"staging_peak_bytes": 2**21 + 1}, ["staged"]),
        ({"gb_per_s": 0.69}, ["all-to-all's rate"]),
        ({"seconds_median": 0.2}, ["2.5 times as fast as gathering, at least 2.8"]),
        ({"bytes_received_max": 0, "lower_bound_max": 0, "gb_per_s": None, "alltoall_gb_per_s": None}, []),
    ],
)
def test_what_must_hold_is_judged(values: dict[str, Any], failing: list[str]) -> None:
    rows = [row("plan", **values), row("gather", seconds_median=0.5, bytes_received_max=2**27)]
    wrong = [line for line in judge(rows).splitlines() if "FAILS" in line]
    assert len(wrong) == len(failing)
    assert all(words in line for words, line in zip(failing, wrong, strict=True))
    assert "one" in render(rows)


def test_cases_have_names_of_their_own_and_a_headline_of_the_size_that_is_told() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(SMOKE) <= {case.name for case in CASES}
    (headline,) = (case for case in CASES if case.name == "headline")
    source, _ = headline.layouts()
    assert source.weights.nbytes >= 200e6
    assert headline.spec.moe is not None
    assert headline.spec.moe.num_experts >= 64


def test_conversion_on_one_device_is_measured(tmp_path: Path) -> None:
    path = "benchmarks/gpu/reshard_one_gpu.py"
    run(path, "--layers", "1", "--experts", "4", "--syncs", "1", "--json", f"{tmp_path}/a.json")
    result = json.loads((tmp_path / "a.json").read_text())
    assert 0 < result["bytes"] <= result["model_bytes"]
    assert result["fraction"] > 0
