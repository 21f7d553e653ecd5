"""The checkpoints of one run: what it goes on from, and what it saves at the end of a step.

Every method is collective. The step's end is the safe point: parameters and optimizer state are where training has
them, and every part of the run has a state.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from hybridrl.checkpoint.files import Lent
from hybridrl.checkpoint.load import load_model, load_states, newest_whole, put_later_aside, what_is_wrong
from hybridrl.checkpoint.manifest import CheckpointError, Manifest, read_manifest, step_of
from hybridrl.checkpoint.retention import remove_leftovers
from hybridrl.checkpoint.save import Saver
from hybridrl.checkpoint.shards import Model
from hybridrl.checkpoint.states import States, per_rank
from hybridrl.config.schema import Config
from hybridrl.config.suggest import hint

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun: how often it has started ranks again for a failure on this node."""


class Checkpoints:
    """Add the models and the parts of the run, then `resume`, then call `safe_point` after each step.

    `note` tells a person something, on rank 0; `lend` gives a save the copies of tensors that are in host memory
    already.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        note: Callable[[str], None],
        lend: Callable[[], Sequence[Lent]] | None = None,
    ) -> None:
        self._config = config
        self._note = note if dist.get_rank() == 0 else _silent
        own = config.checkpoint.dir
        self.folder = Path(own) if own is not None else run_folder / "checkpoints"
        self.states = States()
        self._models: list[Model] = []
        self._saver = Saver(self.folder, config.checkpoint, dist.get_rank(), self._note, lend)
        self._saved: int | None = None
        """The step of the newest checkpoint of this process, or that it went on from."""
        self.continues = False
        """Whether the run goes on in its own folder."""

    def add(self, model: Model) -> None:
        """A model to save; all of them before `resume`."""
        self._models.append(model)

    def resume(self) -> int:
        """Loads what `trainer.resume` says; the number of steps that are done then, 0 for a new run.

        A run that torchrun starts again goes on from its own newest checkpoint, if there is one. Raises
        CheckpointError where what is named is not there or not whole, or is of another model.
        """
        if dist.get_rank() == 0:
            remove_leftovers(self.folder)
        dist.barrier()
        wanted, source = self._config.trainer.resume, None
        if wanted == "auto" or _started_again():
            source = newest_whole(self.folder, self._note)
        own = source is not None
        if source is None and wanted not in ("auto", "none"):
            source = self._named(Path(wanted))
        if source is None:
            self._set_aside()
            return 0
        manifest = read_manifest(source)
        weights_only = not own and self._config.checkpoint.load == "weights"
        if weights_only:
            self._load_weights(source, manifest)
            self._set_aside()
            return 0
        self._load(source, manifest)
        self.continues = source.resolve().parent == self.folder.resolve()
        if self.continues:
            self._put_later_aside(manifest.step)
            self._saved = manifest.step
        else:
            self._set_aside()
        return manifest.step

    def check_place(self) -> None:
        """Raises CheckpointError, on all ranks, where the run is to save and one of them cannot write there."""
        if self._config.checkpoint.every is not None:
            self._saver.check_place()

    def due(self, step: int, save: bool) -> bool:
        """Whether the end of this step is to be saved: it is time to, or `save` says so, and it is not saved yet."""
        every = self._config.checkpoint.every
        last = step == self._config.trainer.steps
        return (save or (every is not None and (step % every == 0 or last))) and self._saved != step

    def safe_point(self, step: int, metrics: Mapping[str, float], *, save: bool) -> None:
        """The end of a step: saves where it is time to, or `save` says so, and completes what is being written.

        Raises CheckpointError, on all ranks, where a checkpoint could not be written.
        """
        if self.due(step, save):
            wanted = self._config.checkpoint.best_metric
            if wanted is not None and wanted not in metrics:
                self._note(
                    f"checkpoint.best_metric={wanted} is no metric of step {step}, which cannot be the best then; "
                    f"{hint(wanted, metrics.keys())}"
                )
            metric = metrics.get(wanted or "")
            finite = metric if metric is not None and math.isfinite(metric) else None
            self._saver.start(step, self._models, self.states.collect(), finite)
            self._saved = step
        if save:
            self.finish()
        else:
            self._saver.poll()

    def finish(self) -> None:
        """Waits until everything is written."""
        self._saver.wait()

    def _named(self, path: Path) -> Path:
        """The checkpoint at a path, or the newest whole one in a folder of them or in a run's."""
        if step_of(path) is not None:
            if problems := what_is_wrong(path):
                raise CheckpointError(f"trainer.resume={path} is not whole: {'; '.join(problems)}")
            return path
        inner = path / "checkpoints"
        found = newest_whole(inner if inner.is_dir() else path, self._note)
        if found is None:
            raise CheckpointError(f"trainer.resume={path} holds no checkpoint; expected folders named step-…")
        return found

    def _load(self, folder: Path, manifest: Manifest) -> None:
        for model in self._models:
            load_model(folder, manifest, model, optimizer=True)
        shared, ranks = load_states(folder)
        own = per_rank(ranks, dist.get_rank())
        if own is None:
            self._note(
                f"{folder} was written by {len(ranks)} ranks and is read by {dist.get_world_size()}: random states of "
                "single ranks start afresh"
            )
        self.states.restore(shared, own)
        self._note(f"goes on from {folder}: {manifest.step} steps are done")

    def _load_weights(self, folder: Path, manifest: Manifest) -> None:
        for model in self._models:
            if model.optimizer:  # what is not trained is what this run says it is
                load_model(folder, manifest, model, optimizer=False)
        self._note(f"starts from the weights of {folder}")

    def _set_aside(self) -> None:
        """A new run's own folder is empty: the run folder is set aside whole, another place is emptied here."""
        if self._config.checkpoint.dir is not None:
            self._put_later_aside(-1)

    def _put_later_aside(self, step: int) -> None:
        if dist.get_rank() == 0:
            for path in put_later_aside(self.folder, step):
                self._note(f"a checkpoint that this run does not go on from was moved to {path}")
        dist.barrier()


def _silent(_: str) -> None:
    """What is said once for all ranks is said by the first."""


def _started_again() -> bool:
    """Whether torchrun started any rank again: nodes count by themselves, so their counts differ."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, int(os.environ.get(RESTARTS, "0")))
    return any(counts)
