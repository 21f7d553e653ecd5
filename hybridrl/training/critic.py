"""Models with a scalar head under Megatron: the critic of PPO, and reward models.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from hybridrl.config.critic import critic_config
from hybridrl.config.schema import Config
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.groups import OtherGroups
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.training.losses import AnyLoss
from hybridrl.training.model import TrainedModel, score_rows
from hybridrl.training.rows import Floats, Row


class Critic(TrainedModel):
    """Values of states: the policy's layers, trained apart. `spec` must have a scalar head.

    `cut` has Megatron's groups where the critic is cut otherwise than the policy, whose groups are in force outside.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        sizes: ParallelSizes,
        *,
        folder: Path,
        total_updates: int,
        cut: OtherGroups | None = None,
    ) -> None:
        self._cut = cut
        with self._in_force():
            super().__init__(config, spec, sizes, folder=folder, total_updates=total_updates)

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """[length] float32 by row: at token i the value of the tokens before it, the state that it was chosen in.

        Entry 0, which has no state, is 0.
        """
        with self._in_force():
            (values,) = score_rows(self._passes, self._groups, rows)
        return values

    def update(self, rows: Sequence[Row], loss: AnyLoss, *, lr: float | None = None) -> dict[str, float]:
        """See `TrainedModel.update`."""
        with self._in_force():
            return super().update(rows, loss, lr=lr)

    def _in_force(self) -> AbstractContextManager[None]:
        return nullcontext() if self._cut is None else self._cut.in_force()


def make_critic(config: Config, spec: ModelSpec, sizes: ParallelSizes, *, folder: Path, total_updates: int) -> Critic:
    """The run's critic; `sizes` are the policy's, whose groups are in force. Collective."""
    own = critic_config(config)
    if own.parallel == config.parallel:
        return Critic(own, spec, sizes, folder=folder, total_updates=total_updates)
    parallel = own.parallel
    cut = replace(sizes, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp)
    groups = OtherGroups(cut, vpp=parallel.vpp)
    return Critic(own, spec, cut, folder=folder, total_updates=total_updates, cut=groups)


class RewardModel(TrainedModel):
    """Scores of whole sequences. `spec` must have a scalar head."""

    def scores_of_rows(self, rows: Sequence[Row]) -> Floats:
        """[n] float32, of rows that `hybridrl.training.preference.scored_row` made."""
        (values,) = score_rows(self._passes, self._groups, rows)
        return np.asarray([found[-1] for found in values], np.float32)
