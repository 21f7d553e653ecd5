"""The checkpoint benchmark runs and writes what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMES = {"stall_seconds", "slower_seconds", "whole_seconds", "steps", "first_stall_seconds", "gb_per_s"}


def test_each_method_saves_on_every_rank(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--smoke", "--repeats", "1", "--json", f"{tmp_path}/a.json", "--folder", str(tmp_path)]
    shown = subprocess.run(
        [*torchrun, "benchmarks/checkpoint.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    ).stdout
    result = json.loads((tmp_path / "a.json").read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert set(rows) == {"synchronous", "asynchronous", "plain"}
    assert all(set(row) == {"method", *TIMES} for row in rows.values())
    assert all(row["whole_seconds"] >= row["stall_seconds"] > 0 for row in rows.values())
    assert rows["synchronous"]["steps"] == rows["plain"]["steps"] == 0, "no step is beside it"
    assert rows["asynchronous"]["steps"] > 0
    assert result["ranks"] == 2
    assert result["bytes"] > 100_000
    assert all(name in shown for name in rows)
    assert os.listdir(tmp_path) == ["a.json"], "what was saved is removed"
