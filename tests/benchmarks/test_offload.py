"""The offload benchmarks run, write what they say, and judge by their targets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.offload import TARGETS, judge, render

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"direction", "method", "gb_per_s", "seconds", "hidden_seconds", "bytes", "device"}


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    ).stdout


def test_every_method_is_measured_in_both_directions(tmp_path: Path) -> None:
    shown = run("benchmarks/offload.py", "--mib", "24", "--repeats", "1", "--json", f"{tmp_path}/a.json")
    rows = json.loads((tmp_path / "a.json").read_text())
    assert {(row["method"], row["direction"]) for row in rows} == {
        (method, direction) for method in ("arena", "copy", "megatron") for direction in ("out", "in")
    }
    assert all(set(row) == FIELDS and row["seconds"] > 0 and row["bytes"] >= 24 * 2**20 for row in rows)
    assert all(row["method"] in shown for row in rows)


def test_the_cycles_of_one_gpu_pass_on_a_cpu() -> None:
    if not torch.cuda.is_available():
        assert "20 cycles of" in run("benchmarks/gpu/offload_one_gpu.py", "--mib", "24")


def test_what_misses_its_target_is_named() -> None:
    good = [
        {"method": m, "direction": d, "gb_per_s": 10.0, "seconds": 1.0, "hidden_seconds": 1.0, "device": "cuda"}
        for m in ("arena", "copy", "megatron")
        for d in ("out", "in")
    ]
    for row in good:
        if row["method"] == "megatron":
            row["gb_per_s"] = 10.0 / TARGETS["cuda"]["megatron"]
    assert judge(good) == []
    assert "arena" in render(good)
    slow = [dict(row) for row in good]
    slow[0] |= {"gb_per_s": 8.4, "hidden_seconds": 0.7}
    assert judge(slow) == [
        "out: 0.84 of copy, expected 0.85 at least",
        "out: 1.68 of megatron, expected 2.0 at least",
        "out: 0.70 of the time is hidden, expected 0.8 at least",
    ]
