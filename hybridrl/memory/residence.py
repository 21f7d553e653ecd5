"""What a trained model holds beside its parameters, and when it is on the device: gradients and optimizer state.

The optimizer asks before it uses either, so an update cannot meet memory that has left:

    residence.before_gradients()    gradient buffers have memory; optimizer state is on its way
    residence.before_step()         optimizer state is on its way, at the latest

Each of torch's optimizers then waits, as its step begins, for its own state alone: the norm of the gradients, and the
steps of a chained optimizer's parts, pass while the rest still comes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.memory.loan import Loan
from hybridrl.memory.pages import prefer_large_pages
from hybridrl.memory.parcel import Parcel, planned_bytes, whole


class Residence(Protocol):
    """What the training code asks before it uses memory that may have left. Raises PhaseError out of turn."""

    def before_forward(self) -> None:
        """Parameters are about to be read."""

    def before_gradients(self) -> None:
        """Gradient buffers are about to be cleared, for an update."""

    def before_step(self) -> None:
        """Gradients are whole, and the optimizer is about to step, or to drop its state."""


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
        return [master for part in self.by_part() for master in part[0]]

    def moments(self) -> list[list[Tensor]]:
        """One list a kind of moment. Step counts stay where they are: they are single numbers."""
        kinds: dict[str, list[Tensor]] = {}
        for part in parts(self._optimizer):
            for kind, tensors in _moments(part).items():
                kinds.setdefault(kind, []).extend(tensors)
        return list(kinds.values())

    def by_part(self) -> list[list[list[Tensor]]]:
        """For each part of a chained optimizer, in the order of their steps, its masters, then each kind of moment.

        All in the order of the part's parameters.
        """
        theirs = [tensor.untyped_storage() for tensor in self._parameters()]
        same = {storage._cdata for storage in theirs}
        spans = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in theirs}

        def own(master: Tensor) -> bool:
            if master.untyped_storage()._cdata in same:
                return False
            return not any(a <= master.data_ptr() < b for a, b in spans)

        return [
            [[p for group in part.param_groups for p in group["params"] if own(p)], *_moments(part).values()]
            for part in parts(self._optimizer)
        ]

    def groups(self) -> list[list[Tensor]]:
        """What leaves, part after part; see `by_part`."""
        return [group for part in self.by_part() for group in part]

    def planned_bytes(self, moments: int) -> int:
        """Bytes of an arena's section for all of it, with so many moments a parameter, be they there yet or not."""
        found = 0
        for part, (masters, *_) in zip(parts(self._optimizer), self.by_part(), strict=True):
            sizes = [4 * p.numel() for group in part.param_groups for p in group["params"]]
            found += planned_bytes([[4 * p.numel() for p in masters], *([sizes] * moments)])
        return found

    def on_step(self, wait: Callable[[list[Tensor]], None]) -> None:
        """Has each part, whenever its step begins, call `wait` with its masters and moments."""
        for index, part in enumerate(parts(self._optimizer)):

            def begin(*_: Any, index: int = index) -> None:
                wait([tensor for group in self.by_part()[index] for tensor in group])

            part.register_step_pre_hook(begin)


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
        if parcel is not None:
            state.on_step(parcel.wait_for)

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
        if self.parcel is not None:
            self.parcel.come_back()

    def release(self) -> None:
        """Frees the gradients, and starts to copy the state away."""
        if self.gradients is not None:
            self.gradients.release()
        if self.parcel is not None:
            self.parcel.leave(self.state.groups())

    def lend(self) -> Loan | None:
        """The arena's copy of the state, which stays on the device too; None where it has no place in the arena."""
        return None if self.parcel is None else self.parcel.lend(self.state.groups())

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


def _moments(part: Any) -> dict[str, list[Tensor]]:
    """By kind, what a torch optimizer keeps of its parameters but for their step counts."""
    kinds: dict[str, list[Tensor]] = {}
    for state in part.state.values():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                kinds.setdefault(kind, []).append(value)
    return kinds


def _stepped(optimizer: Any) -> Iterator[Tensor]:
    """What the torch optimizers step: parameters, their shards, or master weights of either."""
    for part in parts(optimizer):
        for group in part.param_groups:
            yield from group["params"]
