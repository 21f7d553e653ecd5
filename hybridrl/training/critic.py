"""Models with a scalar head under Megatron: the critic of PPO, and reward models.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Sequence

import numpy as np

from hybridrl.training.model import TrainedModel, score_rows
from hybridrl.training.rows import Floats, Row


class Critic(TrainedModel):
    """Values of states: the policy's layers, trained apart. `spec` must have a scalar head."""

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """[length] float32 by row: at token i the value of the tokens before it, the state that it was chosen in.

        Entry 0, which has no state, is 0.
        """
        (values,) = score_rows(self._passes, self._groups, rows)
        return values


class RewardModel(TrainedModel):
    """Scores of whole sequences. `spec` must have a scalar head."""

    def scores_of_rows(self, rows: Sequence[Row]) -> Floats:
        """[n] float32, of rows that `hybridrl.training.preference.scored_row` made."""
        (values,) = score_rows(self._passes, self._groups, rows)
        return np.asarray([found[-1] for found in values], np.float32)
