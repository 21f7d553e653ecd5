"""What gloo and NCCL have in common: one all-to-all with split sizes a round, over a group of their own."""

import torch
import torch.distributed as dist

from hybridrl.reshard.buffers import Staging, make_staging
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports.base import Exchange


class AllToAllTransport:
    """A `Transport` but for its `finish`; over a group, or the world where it is None."""

    overlaps = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._work: dist.Work | None = None

    def stage(self, plan: Plan, device: torch.device, slots: int) -> Staging:
        """See `Transport.stage`."""
        return make_staging(plan, device, slots)

    def start(self, exchange: Exchange) -> None:
        """See `Transport.start`."""
        self._work = dist.all_to_all_single(
            exchange.receive, exchange.send, exchange.receive_splits, exchange.send_splits, self._group, async_op=True
        )

    def highest(self, first: int, second: int) -> None:
        """See `Transport.highest`."""

    def close(self) -> None:
        """The connections are the group's."""
