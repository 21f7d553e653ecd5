"""What a trained model holds beside its parameters, and when it is on the device: gradients and optimizer state.

The optimizer asks before it uses either, so an update cannot meet memory that has left:

    residence.before_gradients()    gradient buffers have memory; optimizer state is on its way
    residence.before_step()         optimizer state is there
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.memory.pages import prefer_large_pages
from hybridrl.memory.parcel import Parcel, planned_bytes, whole


class Residence(Protocol):
    """What the training code asks before it uses memory that may have left. Raises PhaseError out of turn."""

    def before_forward(self) -> None:
        """Parameters are about to be read."""

    def before_gradients(self) -> None:
        """Gradient buffers are about to be cleared, for an update."""

    def before_step(self) -> None:
        """Master weights and moments are about to be used."""


class Always:
    """The residence of a model that has its device to itself."""

    def before_forward(self) -> None:
        """Nothing ever left."""

    before_gradients = before_step = before_forward


class Gradients:
    """Gradient buffers of wrapped chunks (Megatron's DistributedDataParallel): released whole, views and all."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self._buffers: list[Tensor] = [
            buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._sizes = [int(b.storage_offset() + b.numel()) * b.element_size() for b in self._buffers]  # released or not
        self._optimizer = optimizer

    def tensors(self) -> list[Tensor]:
        """The buffers, and gradients of master weights that are no views of them (those of shards always are)."""
        own = (p.grad for p in _stepped(self._optimizer) if p.is_leaf and p.grad is not None)
        return [*self._buffers, *own]

    def release(self) -> None:
        """Frees them. What they held is lost: it has been used."""
        for parameter in _stepped(self._optimizer):
            parameter.grad = None
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Gives them memory again, all zeros, where they have none."""
        for buffer, nbytes in zip(self._buffers, self._sizes, strict=True):
            storage = buffer.untyped_storage()
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                if buffer.device.type == "cpu":
                    prefer_large_pages(storage.data_ptr(), nbytes)
                whole(storage).zero_()


class OptimizerState:
    """Master weights and moments of Megatron's optimizers, plain, distributed and chained.

    Args:
        optimizer: Megatron's.
        parameters: the model's; a master weight that is a view of one (float32 training) is left to it.
    """

    def __init__(self, optimizer: Any, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters

    def masters(self) -> list[Tensor]:
        """Float32 copies of parameters of a lower precision, or this rank's shards of them."""
        theirs = [tensor.untyped_storage() for tensor in self._parameters()]
        same = {storage._cdata for storage in theirs}
        spans = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in theirs}
        return [
            p
            for p in _stepped(self._optimizer)
            if p.untyped_storage()._cdata not in same and not any(a <= p.data_ptr() < b for a, b in spans)
        ]

    def moments(self) -> list[list[Tensor]]:
        """One list a kind of moment. Step counts stay where they are: they are single numbers."""
        kinds: dict[str, list[Tensor]] = {}
        for part in parts(self._optimizer):
            for state in part.state.values():
                for kind, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        kinds.setdefault(kind, []).append(value)
        return list(kinds.values())

    def groups(self) -> list[list[Tensor]]:
        """What leaves: the masters, then each kind of moment, in the order of the optimizer's parameters."""
        return [self.masters(), *self.moments()]

    def planned_bytes(self, moments: int) -> int:
        """Bytes of an arena's section for all of it, with so many moments a parameter, be they there yet or not."""
        sizes = [4 * p.numel() for p in _stepped(self._optimizer)]
        masters = [4 * p.numel() for p in self.masters()]
        return planned_bytes([masters, *([sizes] * moments)])


class WholeState(OptimizerState):
    """Parameters, master weights and moments of a model that no engine serves: all of it leaves."""

    def groups(self) -> list[list[Tensor]]:
        """What leaves: the parameters, then the optimizer's state."""
        return [list(self._parameters()), *super().groups()]

    def planned_bytes(self, moments: int) -> int:
        """Bytes of an arena's section for all of it."""
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in self._parameters())}
        return planned_bytes([storages.values()]) + super().planned_bytes(moments)


class ModelResidence:
    """The residence of one trained model. `allowed` raises PhaseError where an update is out of turn.

    Args:
        state, parcel: what leaves, and how it travels; None where it stays on the device.
        gradients: None where they stay.
        prefetch: state starts back with the update's beginning, not after its last backward pass.
    """

    def __init__(
        self,
        state: OptimizerState,
        parcel: Parcel | None,
        gradients: Gradients | None,
        *,
        prefetch: bool,
        allowed: Callable[[str], None],
    ) -> None:
        self.state, self.parcel, self.gradients = state, parcel, gradients
        self._prefetch = prefetch
        self._allowed = allowed

    def before_forward(self) -> None:
        """See `Residence`."""
        self._allowed("a forward pass of the trainer")
        if isinstance(self.state, WholeState):
            self.fetch()

    def before_gradients(self) -> None:
        """See `Residence`."""
        self._allowed("an update")
        if self.gradients is not None:
            self.gradients.restore()
        if self.parcel is not None and self._prefetch:
            self.parcel.come_back()

    def before_step(self) -> None:
        """See `Residence`."""
        self._allowed("an optimizer step")
        self.fetch()

    def release(self) -> None:
        """Frees the gradients, and starts to copy the state away."""
        if self.gradients is not None:
            self.gradients.release()
        if self.parcel is not None:
            self.parcel.leave(self.state.groups())

    def released(self) -> None:
        """Until the state has left and its memory is free."""
        if self.parcel is not None:
            self.parcel.left()

    def fetch(self) -> None:
        """Until the state is on the device."""
        if self.parcel is not None:
            self.parcel.wait()


def parts(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part.optimizer


def _stepped(optimizer: Any) -> Iterator[Tensor]:
    """What the torch optimizers step: parameters, their shards, or master weights of either."""
    for part in parts(optimizer):
        for group in part.param_groups:
            yield from group["params"]
