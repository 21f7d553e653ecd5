"""Which checkpoints stay."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybridrl.checkpoint.manifest import CheckpointError, checkpoints, read_manifest, step_of
from hybridrl.config.schema import CheckpointConfig

ASIDE = ".writing-"
REMOVING = ".removing-"


def kept(steps: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Of the steps with a checkpoint, each with its metric, those to keep: the newest `keep_last`, the multiples of
    `keep_every`, and the best by its metric (of equals the newest)."""
    newest = sorted(steps)[-config.keep_last :]
    every = [step for step in steps if config.keep_every is not None and step % config.keep_every == 0]
    sign = 1 if config.best_mode == "max" else -1
    scored = [(sign * metric, step) for step, metric in steps.items() if metric is not None]
    best = [max(scored)[1]] if scored and config.best_metric is not None else []
    return {*newest, *every, *best}


def remove_old(parent: Path, config: CheckpointConfig) -> None:
    """Removes what is not to be kept. What is not a whole checkpoint is nobody's to remove, nor is a link."""
    steps: dict[int, float | None] = {}
    for folder in checkpoints(parent):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue  # it is told when it would be read, and counts for nothing here
        if not folder.is_symlink():
            steps[manifest.step] = manifest.metric
    stay = kept(steps, config)
    remove(folder for folder in checkpoints(parent) if step_of(folder) in steps.keys() - stay)


def remove(folders: Iterable[Path]) -> None:
    """Removes folders; none of them is ever seen under its name with some of its files gone."""
    for folder in folders:
        doomed = folder.with_name(REMOVING + folder.name)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what is left is removed with the next


def remove_leftovers(parent: Path) -> None:
    """Removes what an earlier process was writing or removing when it ended. No other may be writing here."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name.startswith((ASIDE, REMOVING)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
