"""The phase switch: one device, which the trainer and the engine have in turn.

    with hybrid.training_phase():            forward passes, updates
        ...
    with hybrid.rollout_phase(version):      generation, from the weights as trained so far
        ...

Entering a rollout: gradients are released and optimizer state starts to leave; the engine's parameters get memory and
the weights, while it goes on leaving; when it has left, on every rank, the KV cache gets memory, and the weights are
published. So the most that is there at once is what training held, or what the rollout holds, and two buckets of a
reshard. Leaving it, the engine goes to sleep and what training needs starts back; optimizer state comes with the
update that uses it.

What is out of turn is refused. After an exception inside a phase nothing is done at once, since other ranks may be
anywhere: the next phase, which all ranks enter, first ends what was begun.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from hybridrl.memory.ledger import Ledger
from hybridrl.memory.loan import Loan
from hybridrl.memory.parcel import Parcel
from hybridrl.memory.residence import Gradients, ModelResidence, OptimizerState
from hybridrl.memory.weights import Weights


class PhaseError(RuntimeError):
    """A call that the phase does not allow."""


class RolloutEngine(Protocol):
    """What the phase switch asks of an engine; see `hybridrl.rollout.engine.Engine`."""

    @property
    def cache_bytes(self) -> int: ...

    def abort(self, which: Collection[tuple[int, int]] | None = None) -> list[Any]: ...

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def publish(self, version: int) -> None: ...


class Phase(Enum):
    """Who has the device."""

    BETWEEN = "between phases"
    ROLLOUT = "the rollout phase"
    TRAINING = "the training phase"
    SAVING = "a save"


class HybridEngine:
    """The phases of one run, on this rank. Every rank enters and leaves them together.

    Args:
        engine: it is put to sleep here: the trainer has the device first.
        weights: how parameters change phase.
        ledger: entries are added at each border.
        barrier: of all ranks.
        give_back: frees what the allocator keeps, where the engine is another process on the same device.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: Weights,
        ledger: Ledger,
        *,
        barrier: Callable[[], None],
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self.phase = Phase.BETWEEN
        self._engine, self._weights, self._ledger = engine, weights, ledger
        self._barrier, self._give_back = barrier, give_back
        self._models: dict[str, ModelResidence] = {}
        self._interrupted = self._generating = False
        self._growth: int | None = None
        """Bytes that the weights take more in a rollout than in training; known after the first."""
        engine.sleep()

    def attach(
        self,
        name: str,
        state: OptimizerState,
        gradients: Gradients | None,
        parcel: Parcel | None,
        *,
        prefetch: bool,
    ) -> ModelResidence:
        """The residence of a trained model, whose state and gradients leave with each rollout; see `ModelResidence`."""
        if name in self._models:
            raise ValueError(f"a model {name} is attached already")
        model = ModelResidence(state, parcel, gradients, prefetch=prefetch, allowed=self._require_training)
        self._models[name] = model
        return model

    @contextmanager
    def rollout_phase(self, version: int) -> Iterator[dict[str, float]]:
        """The engine has the device, with the trained weights in service as `version`; yields what the sync says.

        Raises PhaseError inside another phase.
        """
        with self._entered(Phase.ROLLOUT):
            self._generating = True
            yield self._to_rollout(version)
            self.end_rollout()

    def end_rollout(self) -> None:
        """Nothing more is generated in this rollout phase: the engine sleeps, and what training needs starts back.

        So the rest of the phase, such as judging, goes on beside it. Raises PhaseError outside a rollout phase; leaving
        the phase does the same, where it is not done yet.
        """
        if self.phase is not Phase.ROLLOUT:
            raise PhaseError(f"a rollout cannot end in {self.phase.value}")
        if self._generating:
            self._to_training()
        self._generating = False

    @contextmanager
    def training_phase(self) -> Iterator[None]:
        """The trainer has the device. Raises PhaseError inside another phase."""
        with self._entered(Phase.TRAINING):
            self._weights.wait()
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Parameters and optimizer state are on the device and stay as they are: for saving or loading them.

        Between phases, or in the training phase between updates. Raises PhaseError during a rollout.
        """
        if self.phase is Phase.TRAINING:
            self._fetch()
            yield
            return
        with self._entered(Phase.SAVING):
            self._weights.wait()
            self._fetch()
            yield

    def lend(self) -> list[Loan]:
        """While saving: the arena's copies of what has a place there, so that a save need not make its own.

        The next rollout waits for their end before it writes there. Raises PhaseError elsewhere.
        """
        if self.phase not in (Phase.SAVING, Phase.TRAINING):
            raise PhaseError(f"state cannot be lent in {self.phase.value}: enter saving() first")
        loans = [model.lend() for model in self._models.values()]
        return [loan for loan in loans if loan is not None]

    def take_metrics(self) -> dict[str, float]:
        """What moved since the last call, as `memory/out_*` and `memory/in_*`: bytes, seconds, and those hidden."""
        parcels = [model.parcel for model in self._models.values() if model.parcel is not None]
        found: dict[str, float] = {}
        for direction in ("out", "in"):
            for parcel in parcels:
                traffic = parcel.out if direction == "out" else parcel.back
                for key, value in traffic.take().items():
                    found[f"memory/{direction}_{key}"] = found.get(f"memory/{direction}_{key}", 0.0) + value
        return found

    @contextmanager
    def _entered(self, phase: Phase) -> Iterator[None]:
        if self.phase is not Phase.BETWEEN:
            raise PhaseError(f"{phase.value} cannot begin inside {self.phase.value}: leave that first")
        self._settle()
        self.phase = phase
        try:
            yield
        except BaseException:
            self._interrupted = True
            raise
        finally:
            self.phase = Phase.BETWEEN

    def _settle(self) -> None:
        """Ends what an exception interrupted: nothing in flight, the engine asleep, the weights on their way back."""
        if not self._interrupted:
            return
        self._engine.abort()
        self._engine.sleep()
        self._weights.to_training()
        self._weights.wait()
        self._interrupted = False

    def _to_rollout(self, version: int) -> dict[str, float]:
        held = self._ledger.mark("trained").total
        for model in self._models.values():
            model.release()
        left = sum(self._ledger.count().values())
        if self._growth is None or left + self._growth > held:
            self._released()  # there is no room yet for the engine's weights, or who knows
            left = sum(self._ledger.count().values())
        self._engine.wake_weights()
        woken = self._ledger.mark("woken").total
        moved = self._weights.to_rollout(version)
        self._growth = max(woken, self._ledger.mark("synced").total) - left
        self._released()
        if self._give_back is not None:
            self._give_back()
        self._barrier()  # an engine over several ranks wakes when all of them have room
        self._engine.wake_cache()
        self._engine.publish(version)
        self._ledger.mark("rollout")
        return moved

    def _to_training(self) -> None:
        self._ledger.mark("generated")
        self._engine.sleep()
        self._weights.to_training()
        self._ledger.mark("asleep")

    def _released(self) -> None:
        for model in self._models.values():
            model.released()

    def _fetch(self) -> None:
        for model in self._models.values():
            model.fetch()

    def _require_training(self, what: str) -> None:
        if self.phase is not Phase.TRAINING:
            raise PhaseError(f"{what} in {self.phase.value}: enter training_phase() first, memory it uses may be away")
