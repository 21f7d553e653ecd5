"""The policy under Megatron: scoring rows and updating on them; and the frozen copy that a KL asks for.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.schema import Config
from hybridrl.models.megatron.build import named_tensors
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.training.model import TrainedModel, groups_of, load, score_rows, training_layout
from hybridrl.training.passes import Passes
from hybridrl.training.rows import Floats, Row


@dataclass(frozen=True)
class Scores:
    """[length] float32 a row, about each token given those before it; entry 0 is 0."""

    log_probs: list[Floats]
    entropy: list[Floats]


class Reference:
    """A model that scores and is not trained: the folder's weights, or the policy's as `take` found them, sharded as in
    training."""

    def __init__(self, config: Config, spec: ModelSpec, sizes: ParallelSizes, *, folder: Path) -> None:
        self.layout = training_layout(config, spec, sizes)
        self._groups = groups_of(sizes)
        chunks = load(config, spec, self.layout, self._groups, folder)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._tensors = named_tensors(chunks)
        self._passes = Passes(chunks, config, spec, self._groups)

    @torch.no_grad()
    def take(self, policy: Mapping[str, Tensor]) -> None:
        """Makes the policy's current weights (`Actor.tensors`) the reference's."""
        for name, tensor in self._tensors.items():
            tensor.copy_(policy[name])

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row, at the rollout's temperature; entry 0 of a row is 0."""
        return self.score(rows).log_probs

    def score(self, rows: Sequence[Row]) -> Scores:
        """Log-probs and entropies, in the order of the rows."""
        return Scores(*score_rows(self._passes, self._groups, rows))


class Actor(TrainedModel):
    """The policy that is trained."""

    @property
    def _in_region(self) -> bool:
        return self.config.memory.parameters == "single"

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row, at the rollout's temperature; entry 0 of a row is 0."""
        return self.score(rows).log_probs

    def score(self, rows: Sequence[Row]) -> Scores:
        """Log-probs and entropies under the current weights, in the order of the rows."""
        return Scores(*score_rows(self._passes, self._groups, rows))
