"""What a transport is given, and what it must do."""

from dataclasses import dataclass
from typing import Protocol

import torch

from hybridrl.reshard.buffers import Staging
from hybridrl.reshard.plan import Plan


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

    overlaps: bool
    """Whether bytes move by themselves between `start` and `finish`, so that packing the next round beside it pays.
    Where not, the next round may be packed only after the one before it was unpacked."""

    def stage(self, plan: Plan, device: torch.device, slots: int) -> Staging:
        """Buffers for the plan's rounds; `slots` of each where the transport does not decide by itself. Collective."""

    def start(self, exchange: Exchange) -> None:
        """Begins an exchange once what was enqueued before is done; its buffers are the transport's until `finish`."""

    def finish(self) -> None:
        """The fence: what comes after it sees the received bytes. Raises TransportError; nothing where none began."""

    def highest(self, first: int, second: int) -> tuple[int, int] | None:
        """The highest of each over all ranks; None, on all ranks, where a collective of the world is as good.
        Collective. Raises TransportError."""

    def close(self) -> None:
        """Ends a transport that is not used again."""
