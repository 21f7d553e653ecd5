"""NCCL: grouped sends and receives on the communicator's own stream, fenced by events; the host never waits."""

import torch
import torch.distributed as dist

from hybridrl.reshard.buffers import Staging, make_staging
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports.base import Exchange


class NcclTransport:
    """A `Transport` over an NCCL group (None: the world).

    An all-to-all over NCCL is one group of sends and receives that leaves out what is empty. It runs on the
    communicator's stream, after what the current stream has enqueued; `finish` makes the current stream, not the host,
    wait for it. So packing of the next round, enqueued in between, runs beside it. A peer that fails or is too late is
    the watchdog's of the group.
    """

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

    def finish(self) -> None:
        """See `Transport.finish`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def highest(self, first: int, second: int) -> None:
        """See `Transport.highest`."""

    def close(self) -> None:
        """The communicator is the group's."""
