"""A model that lives in the arena and visits the device through another's storage: a reference, beside the policy.

For a visit the two change places, a chunk at a time through a small buffer, and afterwards they change back. So neither
the device nor the host ever holds a copy more, and the policy's weights come back as they were, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridrl.memory.parcel import planned_bytes

CHUNK = 16 << 20
"""Bytes that change places at a time."""


class Visitor:
    """Weights in the arena for the storage of `hosts`.

    Args:
        hosts: the parameters whose storage is lent, by name, all contiguous.
        section: uint8, host memory of `visitor_bytes(hosts)` that is the visitor's alone.
        allowed: raises PhaseError where the hosts must not be used now, since their memory may be away.

    Raises ValueError for a host that is not contiguous.
    """

    def __init__(self, hosts: Mapping[str, Tensor], section: Tensor, allowed: Callable[[], None]) -> None:
        if loose := [name for name, tensor in hosts.items() if not tensor.is_contiguous()]:
            raise ValueError(f"{', '.join(loose)}: not contiguous, so their storage cannot be lent as it is")
        self._hosts, self._slots, self._allowed = dict(hosts), {}, allowed
        offset = 0
        for name, tensor in hosts.items():
            self._slots[name] = section[offset : offset + tensor.nbytes]
            offset += planned_bytes([[tensor.nbytes]])
        self._device = next((tensor.device for tensor in hosts.values()), torch.device("cpu"))
        self._swapped = 0
        """Chunks that are in each other's place."""

    @property
    def here(self) -> bool:
        """Whether the hosts hold the visitor's weights now."""
        return self._swapped > 0

    def tensors(self) -> dict[str, Tensor]:
        """The visitor's weights where they lie in the arena, by name: for reading and writing. Not during a visit."""
        return {name: self._slots[name].view(host.dtype).view(host.shape) for name, host in self._hosts.items()}

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Makes these weights, named, shaped and typed as the hosts, the visitor's. Raises RuntimeError in a visit."""
        if self.here:
            raise RuntimeError("the visitor's weights are on the device now: take others after the visit")
        for name, slot in self._slots.items():
            slot.copy_(_flat(weights[name]))

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """The hosts hold the visitor's weights. Raises PhaseError out of turn, RuntimeError inside another visit."""
        self._allowed()
        if self.here:
            raise RuntimeError("a visit has begun already and has not ended")
        chunks = list(self._chunks())
        try:
            self._exchange(chunks)
            yield
        finally:
            self._exchange(chunks[: self._swapped], back=True)

    @torch.no_grad()
    def _exchange(self, chunks: list[tuple[Tensor, Tensor]], back: bool = False) -> None:
        buffer = torch.empty(min(CHUNK, max((slot.numel() for _, slot in chunks), default=0)), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        for host, slot in chunks:
            kept = buffer[: slot.numel()]
            kept.copy_(host)
            host.copy_(slot, non_blocking=True)  # in the stream's order, and the host waits below
            slot.copy_(kept, non_blocking=True)
            self._swapped += -1 if back else 1
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, slot in self._slots.items():
            yield from zip(_flat(self._hosts[name]).split(CHUNK), slot.split(CHUNK), strict=True)


def visitor_bytes(hosts: Mapping[str, Tensor]) -> int:
    """Bytes of a section for the weights of these parameters."""
    return sum(planned_bytes([[tensor.nbytes]]) for tensor in hosts.values())


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
