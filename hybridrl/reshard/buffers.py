"""Staging: the buffers that messages are packed into and received in, taken once and kept."""

from collections.abc import Mapping, Sequence

import torch

from hybridrl.reshard.plan import Message, Plan

ALIGNMENT = 64
SCRATCH_BYTES = 2**19


class Staging:
    """Pairs of a send and a receive buffer; round `k` uses the pair `k mod slots`.

    With two slots a round can be packed while the one before is in flight; `nbytes` counts all of them.
    """

    def __init__(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
        self.send = list(send)
        self.receive = list(receive)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        """Where rows are gathered before they are converted; empty where none are."""

    def tensors(self) -> list[torch.Tensor]:
        """All buffers."""
        return [*self.send, *self.receive, self.scratch]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self.tensors())

    def take_scratch(self, limit: int) -> torch.Tensor:
        """The scratch, taken when first asked for: a part of a core's cache, if all buffers stay within the limit."""
        if not self.scratch.numel():
            size = min(SCRATCH_BYTES, limit - self.nbytes) // ALIGNMENT * ALIGNMENT
            self.scratch = torch.zeros(max(0, size), dtype=torch.uint8)
        return self.scratch

    def arrival(self, number: int, message: Message) -> tuple[torch.Tensor, int]:
        """Where a message that is received in round `number` lies after its fence: a buffer, and the offset in it."""
        return self.receive[number % len(self.receive)], message.offset


class SharedStaging(Staging):
    """Send buffers that the receivers read themselves; nothing is received elsewhere.

    Args:
        send: this rank's.
        peers: by rank, the send buffers of those that send to this one.
        offsets: by rank and round, where the message to this rank starts in the peer's buffer.
    """

    def __init__(
        self,
        send: Sequence[torch.Tensor],
        peers: Mapping[int, Sequence[torch.Tensor]],
        offsets: Mapping[int, Mapping[int, int]],
    ) -> None:
        super().__init__(send, [torch.empty(0, dtype=torch.uint8)] * len(send))
        self._peers = peers
        self._offsets = offsets

    def arrival(self, number: int, message: Message) -> tuple[torch.Tensor, int]:
        """See `Staging.arrival`."""
        buffers = self._peers[message.peer]
        return buffers[number % len(buffers)], self._offsets[message.peer][number]


def make_staging(plan: Plan, device: torch.device, slots: int) -> Staging:
    """Buffers of this rank's own for a plan. Pages are touched now rather than in the first sync."""
    send, receive = staging_sizes(plan)
    slots = min(slots, max(1, len(plan.rounds)))
    return Staging([_buffer(send, device) for _ in range(slots)], [_buffer(receive, device) for _ in range(slots)])


def staging_sizes(plan: Plan) -> tuple[int, int]:
    """Bytes of one slot's send and receive buffer, the rounding of the last message included."""
    item = plan.planner.item_bytes
    return -(-plan.send_staging_bytes // item) * item, -(-plan.receive_staging_bytes // item) * item


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that begin at a multiple of every element's size."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if buffer.data_ptr() % ALIGNMENT:
        raise RuntimeError(f"the allocator of {device} gave a buffer that is not aligned to {ALIGNMENT} bytes")
    return buffer
