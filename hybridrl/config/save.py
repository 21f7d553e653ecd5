"""The run folder's `config.yaml`: what ran, defaults included."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.schema import Config

_SECRET = re.compile(
    r"(^|[_-])(password|passwd|passphrase|secret|credentials?|authorization"
    r"|(api|access|secret|private)[_-]?key|(api|auth|access|bearer|refresh|hf)[_-]?token)$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
"""Tokens of well-known services by their form, and the name and password of a URL."""
HIDDEN = "<hidden>"


def save_config(config: Config, folder: str | os.PathLike[str]) -> Path:
    """Writes `config.yaml` into the folder (made if need be) and returns its path. Call it on rank 0 alone.

    The file is written aside and renamed, so a reader never sees half of it. Secrets (of a judge's arguments, say) are
    not written; see `without_secrets`.
    """
    path = Path(folder) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        yaml.safe_dump(without_secrets(asdict(config)), file, sort_keys=False, allow_unicode=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path


def without_secrets(value: Any) -> Any:
    """A copy without what must not be written: values under the name of a secret, and texts that look like one."""
    if isinstance(value, str):
        return _SECRET_TEXT.sub(HIDDEN, value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if inner is not None and _SECRET.search(str(key)) else without_secrets(inner)
            for key, inner in value.items()
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value
