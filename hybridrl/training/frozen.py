"""Models that score and are never trained: references, teachers, reward models. Sharded as in training.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from hybridrl.config.schema import Config
from hybridrl.models.megatron.build import named_tensors
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.rollout.routes import Routes
from hybridrl.training.model import groups_of, load, score_rows, training_layout
from hybridrl.training.passes import Passes
from hybridrl.training.rows import Floats, Row


@dataclass(frozen=True)
class Scores:
    """[length] float32 a row, about each token given those before it; entry 0 is 0."""

    log_probs: list[Floats]
    entropy: list[Floats]
    routes: list[Routes] | None = None
    """[length, layers, k] a row: the experts of each token, where they were asked for."""


class FrozenModel:
    """The weights of a folder, on the device for the whole run."""

    def __init__(self, config: Config, spec: ModelSpec, sizes: ParallelSizes, *, folder: Path) -> None:
        self.layout = training_layout(config, spec, sizes)
        self._groups = groups_of(sizes)
        chunks = load(config, spec, self.layout, self._groups, folder)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._tensors = named_tensors(chunks)
        self._passes = Passes(chunks, config, spec, self._groups)

    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's live parameters and buffers, by the names of `layout`."""
        return self._tensors


class FrozenPolicy(FrozenModel):
    """A language model: a teacher, say."""

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row, at the rollout's temperature; entry 0 of a row is 0."""
        return self.score(rows).log_probs

    def score(self, rows: Sequence[Row]) -> Scores:
        """Log-probs and entropies, in the order of the rows."""
        log_probs, entropy = score_rows(self._passes, self._groups, rows)
        return Scores(log_probs, entropy)


class FrozenRewardModel(FrozenModel):
    """A model with a scalar head that judges whole sequences."""

    def scores_of_rows(self, rows: Sequence[Row]) -> Floats:
        """[n] float32, of rows that `hybridrl.training.preference.scored_row` made."""
        (values,) = score_rows(self._passes, self._groups, rows)
        return np.asarray([found[-1] for found in values], np.float32)
