"""A world of one rank, where nothing is ever in flight."""

import torch

from hybridrl.reshard.buffers import Staging, make_staging
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports.base import Exchange, TransportError


class NoTransport:
    """A `Transport` to nobody."""

    overlaps = False

    def stage(self, plan: Plan, device: torch.device, slots: int) -> Staging:
        """See `Transport.stage`."""
        return make_staging(plan, device, slots)

    def start(self, exchange: Exchange) -> None:
        """Raises TransportError where there is something to send: there is nobody to send it to."""
        if exchange.send.numel() or exchange.receive.numel():
            raise TransportError(
                f"{exchange.send.numel()} bytes are to be sent and {exchange.receive.numel()} received, but this rank "
                "is alone: start torch.distributed before the sync"
            )

    def finish(self) -> None:
        """Nothing is in flight."""

    def highest(self, first: int, second: int) -> None:
        """See `Transport.highest`."""

    def close(self) -> None:
        """Nothing is held."""
