"""The run folder's `config.yaml`: what ran, defaults included."""

import os
from dataclasses import asdict
from pathlib import Path

import yaml

from hybridrl.config.schema import Config


def save_config(config: Config, folder: str | os.PathLike[str]) -> Path:
    """Writes `config.yaml` into the folder (made if need be) and returns its path. Call it on rank 0 alone.

    The file is written aside and renamed, so a reader never sees half of it.
    """
    path = Path(folder) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        yaml.safe_dump(asdict(config), file, sort_keys=False, allow_unicode=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path
