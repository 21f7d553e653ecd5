"""Staging: the buffers that messages are packed into and received in, taken once and kept."""

import torch

ALIGNMENT = 64


class Staging:
    """`slots` pairs of a send and a receive buffer on one device.

    With two slots a round can be packed while the one before is in flight; `nbytes` counts all of them.
    """

    def __init__(self, send_bytes: int, receive_bytes: int, device: torch.device, slots: int) -> None:
        self.send = [_buffer(send_bytes, device) for _ in range(slots)]
        self.receive = [_buffer(receive_bytes, device) for _ in range(slots)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in (*self.send, *self.receive))


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that begin at a multiple of every element's size. Pages are touched now rather than in the first sync."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if buffer.data_ptr() % ALIGNMENT:
        raise RuntimeError(f"the allocator of {device} gave a buffer that is not aligned to {ALIGNMENT} bytes")
    return buffer
