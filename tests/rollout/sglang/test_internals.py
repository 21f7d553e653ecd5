"""SGLang's code is still what hybridrl was written against."""

import os
import subprocess
import sys
from pathlib import Path

import hybridrl
from tests.rollout.sglang.support import needs_sglang

RESTATED = {
    "Scheduler.event_loop_normal": "c328a45b821f18a0",
    "Scheduler.run_event_loop": "faae8efd03360b0c",
    "Scheduler.init_ipc_channels": "8dee5ea23751f232",
    "bootstrap._init_parallel_groups": "41ab1b9880f30abe",
}
"""Functions whose body `host.py` and `world.py` restate, by the digest of their source."""

CODE = f"""
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.versions import server_arg_names
assert sg.missing() == [], sg.missing()
assert server_arg_names() == sg.SERVER_ARGS
for name, expected in {RESTATED!r}.items():
    found = sg
    for part in name.split("."):
        found = getattr(found, part)
    assert sg.digest(found) == expected, (name, sg.digest(found))
"""


@needs_sglang
def test_names_and_restated_functions_are_as_they_were() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_sglang_is_imported_in_one_place() -> None:
    package = Path(hybridrl.__file__).parent
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import sglang", "from sglang"))
    }
    assert importers == {"rollout/sglang/internals.py"}
