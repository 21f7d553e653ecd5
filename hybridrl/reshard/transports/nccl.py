"""NCCL: grouped sends and receives on the communicator's own stream, fenced by events; the host never waits."""

from hybridrl.reshard.transports.all_to_all import AllToAllTransport


class NcclTransport(AllToAllTransport):
    """A `Transport` over an NCCL group (None: the world).

    An all-to-all over NCCL is one group of sends and receives that leaves out what is empty. It runs on the
    communicator's stream, after what the current stream has enqueued; `finish` makes the current stream, not the host,
    wait for it. So packing of the next round, enqueued in between, runs beside it. A peer that fails or is too late is
    the watchdog's of the group.
    """

    def finish(self) -> None:
        """See `Transport.finish`."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
