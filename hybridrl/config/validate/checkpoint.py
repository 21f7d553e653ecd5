"""Checkpoints: settings that keep nothing, and places to go on from that are not there."""

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.schema import Config


def checkpoint_problems(config: Config, files: bool) -> Iterator[str]:
    """Mistakes in `checkpoint` and `trainer.resume`; `files=False` leaves out what depends on this machine."""
    chosen, resume = config.checkpoint, config.trainer.resume
    for key in ("keep_every", "best_metric"):
        value = getattr(chosen, key)
        if value is not None and chosen.every is None:
            yield f"checkpoint.{key}={value} with checkpoint.every=null: no checkpoint is made that could be kept"
    if chosen.every is not None and chosen.keep_every is not None and chosen.keep_every % chosen.every:
        yield (
            f"checkpoint.keep_every={chosen.keep_every} is no multiple of checkpoint.every={chosen.every}: most of the "
            "checkpoints to keep are never made"
        )
    named = resume not in ("auto", "none")
    if chosen.load == "weights" and not named:
        yield (
            f"checkpoint.load=weights with trainer.resume={resume}: weights for a new run come from a checkpoint that "
            "trainer.resume names by its path"
        )
    if named and files:
        yield from _source(Path(resume))


def _source(path: Path) -> Iterator[str]:
    """Why nothing can be read from the place that `trainer.resume` names."""
    if not path.is_dir():
        yield f"trainer.resume={path}: no such folder; expected auto, none or the path of a checkpoint"
    elif (path / "config.json").is_file():
        yield (
            f"trainer.resume={path} is a Hugging Face folder, not a checkpoint: a run starts from its weights by "
            f"model.path={path}"
        )
    elif not any(place.match("step-*") for place in (path, *path.glob("step-*"), *path.glob("checkpoints/step-*"))):
        yield (
            f"trainer.resume={path} holds no checkpoint; expected a folder step-…, or one of such folders, or of a run "
            "with checkpoints/"
        )
