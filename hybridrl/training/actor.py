"""The policy under Megatron: scoring rows and updating on them; and the frozen copy that a KL asks for.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.training.frozen import FrozenPolicy, Scores
from hybridrl.training.model import TrainedModel, score_rows
from hybridrl.training.rows import Floats, Row


class Reference(FrozenPolicy):
    """The folder's weights, or the policy's as `take` found them."""

    @torch.no_grad()
    def take(self, policy: Mapping[str, Tensor]) -> None:
        """Makes the policy's current weights (`Actor.tensors`) the reference's."""
        for name, tensor in self._tensors.items():
            tensor.copy_(policy[name])


class Actor(TrainedModel):
    """The policy that is trained."""

    replays = True

    @property
    def _in_region(self) -> bool:
        return self.config.memory.parameters == "single"

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row, at the rollout's temperature; entry 0 of a row is 0."""
        return self.score(rows).log_probs

    def score(self, rows: Sequence[Row], *, keep_routes: bool = False) -> Scores:
        """Log-probs and entropies under the current weights, in the order of the rows.

        Rows with routed experts are routed so. With `keep_routes` the scores have the experts that were chosen.
        """
        routed = self._passes.routed(rows, backward=False, keep=keep_routes)
        log_probs, entropy = score_rows(self._passes, self._groups, rows, routed=routed)
        return Scores(log_probs, entropy, routes=routed.collect() if routed is not None and keep_routes else None)
