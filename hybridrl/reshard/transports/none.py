"""A world of one rank, where nothing is ever in flight."""

from hybridrl.reshard.transports.base import Exchange, TransportError


class NoTransport:
    """A `Transport` to nobody."""

    def start(self, exchange: Exchange) -> None:
        """Raises TransportError where there is something to send: there is nobody to send it to."""
        if exchange.send.numel() or exchange.receive.numel():
            raise TransportError(
                f"{exchange.send.numel()} bytes are to be sent and {exchange.receive.numel()} received, but this rank "
                "is alone: start torch.distributed before the sync"
            )

    def finish(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is held."""
