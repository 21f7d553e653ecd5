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
HIDDEN = "<hidden>"


def save_config(config: Config, folder: str | os.PathLike[str]) -> Path:
    """Writes `config.yaml` into the folder (made if need be) and returns its path. Call it on rank 0 alone.

    The file is written aside and renamed, so a reader never sees half of it. What a key's name calls a secret (of a
    judge's arguments, say) is not written.
    """
    path = Path(folder) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        yaml.safe_dump(_without_secrets(asdict(config)), file, sort_keys=False, allow_unicode=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if inner is not None and _SECRET.search(str(key)) else _without_secrets(inner)
            for key, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value
