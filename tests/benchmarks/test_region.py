"""The script for regions on a GPU runs on a CPU, where the same checks hold."""

import json
from pathlib import Path

from tests.benchmarks.test_reshard import run


def test_the_region_script_passes_on_a_cpu(tmp_path: Path) -> None:
    out = f"{tmp_path}/region.json"
    shown = run("benchmarks/gpu/region_one_gpu.py", "--mib", "16", "--cycles", "2", "--json", out)
    result = json.loads(Path(out).read_text())
    assert "4 of 4 checks hold" in shown
    assert result["checks"] == dict.fromkeys(("pages", "refusals", "addresses", "one copy"), "")
    assert all(result[f"{name}_seconds"] > 0 for name in ("release", "commit", "commit_kept", "there", "back"))
