"""What a run ran on: the versions of what it imports, and the revision of its own source."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hybridrl.files import file_aside

PACKAGES = ("hybridrl", "torch", "megatron-core", "transformer-engine", "transformers", "sglang", "safetensors")


def save_versions(folder: Path) -> None:
    """Writes `versions.json`. What is not installed, and a revision where the source is no checkout, is null."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}, **revision()}
    with file_aside(folder / "versions.json") as aside:
        aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def revision() -> dict[str, str | bool | None]:
    """The commit that the package's source is at, and whether files that git knows differ from it."""
    root = Path(__file__).resolve().parents[2]
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changed = None if commit is None else bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    return {"git_revision": commit, "git_changed": changed}


def _git(root: Path, *words: str) -> str | None:
    try:
        run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
