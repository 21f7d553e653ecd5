"""The critic of PPO under Megatron: the policy's layers, trained apart, with a scalar head that says what is to come.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Sequence

from hybridrl.training.model import TrainedModel, score_rows
from hybridrl.training.rows import Floats, Row


class Critic(TrainedModel):
    """Values of states, trained by `hybridrl.training.losses.Value`. `spec` must have a scalar head."""

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """[length] float32 by row: at token i the value of the tokens before it, the state that it was chosen in.

        Entry 0, which has no state, is 0.
        """
        (values,) = score_rows(self._passes, self._groups, rows)
        return values
