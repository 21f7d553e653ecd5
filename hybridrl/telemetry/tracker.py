"""Metrics on Weights & Biases, whose package is imported where a run asks for it alone."""

import importlib
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hybridrl.config.save import without_secrets
from hybridrl.config.schema import Config
from hybridrl.files import file_aside

ID_FILE = "wandb-id"


class Tracker:
    """A run of the project `trainer.wandb_project`. Logging in is wandb's own matter (`wandb login`, WANDB_API_KEY,
    WANDB_MODE=offline); it raises where that fails."""

    def __init__(self, config: Config, folder: Path) -> None:
        """A run that goes on in its folder is the same run there: its id is kept in `wandb-id`."""
        path = folder / ID_FILE
        if not path.exists():
            with file_aside(path) as aside:
                aside.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        self._run = importlib.import_module("wandb").init(
            project=config.trainer.wandb_project,
            name=config.trainer.name,
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            config=without_secrets(asdict(config)),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until everything has been sent."""
        self._run.finish()
