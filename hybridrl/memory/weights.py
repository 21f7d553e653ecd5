"""The training copy of the parameters on its way between the phases: kept, or in the arena during a rollout.

A third way, one copy that is resharded there and back, is `hybridrl.memory.single`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from hybridrl.memory.parcel import Parcel, planned_bytes

Sync = Callable[[int], dict[str, float]]
"""Brings the trained weights into the engine as a version; returns metrics of the way (see `WeightSync.run`)."""


class Weights(Protocol):
    """How the parameters change phase. Collective, and each call may be repeated."""

    def to_rollout(self, version: int) -> dict[str, float]:
        """The engine's parameters hold the trained weights; returns what the sync says. They must have memory."""

    def to_training(self) -> None:
        """Starts to make the trained weights whole again. The engine must be asleep."""

    def wait(self) -> None:
        """Until they are whole, where the trainer reads and writes them."""


class KeptWeights:
    """The training copy stays on the device, beside the engine's."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def to_rollout(self, version: int) -> dict[str, float]:
        """See `Weights`."""
        return self._sync(version)

    def to_training(self) -> None:
        """They never left."""

    wait = to_training


class OffloadedWeights:
    """The training copy is in the arena during a rollout; storages that the engine shares stay.

    Args:
        sync: see `Sync`.
        parcel: carries it.
        tensors: what leaves, see `unshared`.
    """

    def __init__(self, sync: Sync, parcel: Parcel, tensors: Sequence[Tensor]) -> None:
        self._sync, self._parcel, self._tensors = sync, parcel, list(tensors)

    def to_rollout(self, version: int) -> dict[str, float]:
        """See `Weights`. The copy leaves when the sync has read it."""
        self.wait()
        moved = self._sync(version)
        self._parcel.leave([self._tensors])
        self._parcel.left()
        return moved

    def to_training(self) -> None:
        """See `Weights`."""
        self._parcel.come_back()

    def wait(self) -> None:
        """See `Weights`."""
        self._parcel.wait()


def unshared(training: Iterable[Tensor], engine: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each storage of the trainer's parameters in which no parameter of the engine lies."""
    shared = {tensor.untyped_storage().data_ptr() for tensor in engine}
    found = {t.untyped_storage().data_ptr(): t for t in training if t.untyped_storage().nbytes()}
    return [tensor for place, tensor in found.items() if place not in shared]


def parcel_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of an arena's section for the storages of these tensors."""
    return planned_bytes([[tensor.untyped_storage().nbytes() for tensor in tensors]])
