"""A reference that has no device memory of its own: it visits through the policy's parameters."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridrl.memory.visit import Visitor
from hybridrl.training.actor import Actor, Scores
from hybridrl.training.rows import Floats, Row


class VisitingReference:
    """As `Reference`, over the policy's own modules: its weights take the policy's place while it scores.

    Args:
        actor: as it is now, it is the reference.
        visitor: over the actor's tensors.
    """

    def __init__(self, actor: Actor, visitor: Visitor) -> None:
        self._actor, self._visitor = actor, visitor
        self.take(actor.tensors())

    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights, by the names of the policy's layout, where they lie between visits."""
        return self._visitor.tensors()

    def take(self, policy: Mapping[str, Tensor]) -> None:
        """Makes the policy's current weights (`Actor.tensors`) the reference's."""
        self._visitor.take(policy)

    def log_probs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-prob of each token, by row, at the rollout's temperature; entry 0 of a row is 0."""
        return self.score(rows).log_probs

    def score(self, rows: Sequence[Row]) -> Scores:
        """Log-probs and entropies, in the order of the rows."""
        with self._visitor.visiting():
            return self._actor.score(rows)
