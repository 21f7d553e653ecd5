"""What an installation has and lacks: every package is imported, not looked up.

    python tools/doctor.py            # a table; exit status 0 where a run on this machine can start, else 1
    python tools/doctor.py --json FILE

Each package is imported in a process of its own, so that one that crashes the interpreter is a line in the table.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

IMPORT_S = 180.0


@dataclass(frozen=True)
class Package:
    """Something that is imported."""

    name: str
    module: str
    need: str
    """`always`, `gpu`, or the option that asks for it."""
    remedy: str


PACKAGES = (
    Package("torch", "torch", "always", "make install"),
    Package("megatron-core", "megatron.core", "always", "make install"),
    Package("transformers", "transformers", "always", "make install"),
    Package("hydra-core", "hydra", "always", "make install"),
    Package("omegaconf", "omegaconf", "always", "make install"),
    Package("safetensors", "safetensors", "always", "make install"),
    Package("datasets", "datasets", "always", "make install"),
    Package("math-verify", "math_verify", "always", "make install"),
    Package("reasoning-gym", "reasoning_gym", "always", "make install"),
    Package("tensorboard", "tensorboard", "always", "make install"),
    Package("transformer-engine", "transformer_engine.pytorch", "gpu", "pip install 'hybridrl[gpu]'"),
    Package(
        "sglang",
        "sglang.srt.server_args",
        "rollout.engine=sglang",
        "pip install 'hybridrl[sglang]', or make sglang-cpu",
    ),
    Package("ray", "ray", "rewards.pool=ray, hybridrl.launch.ray", "pip install 'hybridrl[ray]'"),
)


@dataclass(frozen=True)
class Finding:
    """What came of one check."""

    name: str
    found: str
    good: bool
    need: str
    advice: str = ""

    @property
    def blocks(self) -> bool:
        """Whether no run can start on this machine."""
        return not self.good and self.need == "always"


def check_package(package: Package, gpu: bool) -> Finding:
    """Imports it, and tells its version or why it cannot be imported."""
    need = "always" if package.need == "gpu" and gpu else package.need
    code = (
        f"import importlib, importlib.metadata as m; importlib.import_module({package.module!r}); "
        f"print('version', m.version({package.name!r}))"
    )
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return Finding(package.name, f"import took over {IMPORT_S:g} s", False, need, package.remedy)
    told = [line for line in run.stdout.splitlines() if line.startswith("version ")]
    if run.returncode == 0 and told:
        return Finding(package.name, told[-1].removeprefix("version "), True, need)
    last = (run.stderr.strip().splitlines() or [f"ended with status {run.returncode}"])[-1]
    return Finding(package.name, last[:200], False, need, package.remedy)


def check_machine() -> list[Finding]:
    """Python, cores, memory, shared memory, and devices."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    python = sys.version_info[:2] in ((3, 11), (3, 12))
    found = [
        Finding("python", platform.python_version(), python, "always", "" if python else "3.11 or 3.12"),
        Finding("cores", str(len(os.sched_getaffinity(0))), True, "always"),
        Finding("memory", f"{memory / 2**30:.1f} GiB", True, "always"),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        wanted = 64 * 2**20
        advice = "" if free >= wanted else "in a container: --shm-size 1g or more, or --ipc host"
        found.append(Finding("shared memory", f"{free / 2**30:.1f} GiB free", free >= wanted, "always", advice))
    return found


def check_devices() -> Finding:
    """CUDA devices, as torch sees them."""
    code = (
        "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
        "print('devices', n, torch.version.cuda, *[torch.cuda.get_device_name(i) for i in range(n)], sep='|')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S)
    told = [line for line in run.stdout.splitlines() if line.startswith("devices|")]
    if not told:
        return Finding("cuda", "torch cannot tell", False, "gpu", "see torch's line")
    _, count, cuda, *names = told[-1].split("|")
    if int(count):
        return Finding("cuda", f"{count} devices, CUDA {cuda}: {', '.join(sorted(set(names)))}", True, "gpu")
    return Finding("cuda", f"no device (torch for CUDA {cuda})", False, "gpu", "runs use the CPU (trainer.device=cpu)")


def examine(packages: Sequence[Package] = PACKAGES) -> list[Finding]:
    """All findings, the machine's first."""
    devices = check_devices()
    return [*check_machine(), devices, *(check_package(package, devices.good) for package in packages)]


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="writes the findings there")
    options = parser.parse_args()
    findings = examine()
    table = Table(box=None, pad_edge=False)
    for head in ("", "what", "found", "needed for", "what to do"):
        table.add_column(head)
    for one in findings:
        sign = "ok" if one.good else "MISSING" if one.need == "always" else "-"
        table.add_row(*map(escape, (sign, one.name, one.found, one.need, one.advice)))
    Console(width=160).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in findings], indent=1) + "\n", encoding="utf-8")
    blocked = [one.name for one in findings if one.blocks]
    print(f"lacks {', '.join(blocked)}" if blocked else "a run can start here")
    return 1 if blocked else 0


if __name__ == "__main__":
    sys.exit(main())
