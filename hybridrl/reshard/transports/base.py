"""What a transport is given, and what it must do."""

from dataclasses import dataclass
from typing import Protocol

import torch


class TransportError(RuntimeError):
    """An exchange that did not come to its end: a peer that failed, or is too late."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round's bytes on this rank, uint8: messages lie one after another in ascending order of their peers."""

    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    """Bytes to each rank of the group; 0 to those that get none."""
    receive_splits: list[int]


class Transport(Protocol):
    """Exchanges rounds one after another. Every rank of the group joins each exchange, with nothing to send too."""

    def start(self, exchange: Exchange) -> None:
        """Begins an exchange once what was enqueued before is done; its buffers are the transport's until `finish`."""

    def finish(self) -> None:
        """The fence: what comes after it sees the received bytes. Raises TransportError; nothing where none began."""

    def close(self) -> None:
        """Ends a transport that is not used again."""
