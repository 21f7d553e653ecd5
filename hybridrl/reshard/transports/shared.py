"""Shared memory between ranks of one machine: a receiver unpacks straight from its peer's send buffer.

So a byte is copied twice, into the buffer and out of it, and not four times, as where it goes through a socket. A
rank's buffers are memory without a name (`memfd_create`), which peers open by its process and number: the kernel takes
it back with the last process that maps it, and a run that is killed leaves nothing behind.

The fence is a pipe from every rank to every other: each tells all that it has packed, and waits until all have told.
Reading a pipe orders memory, wakes at once and ends with the process that held the other end. On four ranks of two
cores it takes 0.04 ms, where a barrier over gloo takes 2 ms.

Slots alternate between rounds. When a rank has passed the fence of round `k + 1`, all ranks have unpacked round `k`,
whose slot it may then pack anew; and between two syncs all ranks agree on the outcome (see `agreement`).
"""

import mmap
import os
import secrets
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from hybridrl.reshard.buffers import ALIGNMENT, SharedStaging, Staging, staging_sizes
from hybridrl.reshard.golden_checks import agree
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports.base import Exchange, TransportError

_MESSAGE = struct.Struct("<qqq")
_EXCHANGE, _AGREEMENT = range(2)


class _Memory(NamedTuple):
    """Memory of a process that others can open."""

    process: int
    number: int
    name: str

    def open(self) -> int:
        """A descriptor of the same memory. Raises OSError where it is not there: in another machine or container."""
        path = f"/proc/{self.process}/fd/{self.number}"
        found = os.readlink(path)
        if self.name not in found:
            raise OSError(f"{path} is {found}, and was to be {self.name}")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class _Offer(NamedTuple):
    """What a rank lets the others open."""

    memory: _Memory
    doors: dict[int, int]
    """By peer, the end of a pipe that it is to write to."""


class SharedTransport:
    """A `Transport` over a group (None: the world) of processes of one machine; made by `connect`.

    Args:
        resources: closes all descriptors.
        doors: by peer, the pipe that tells it.
        bells: by peer, the pipe by which it tells this rank.
        timeout: seconds that an exchange may take.
    """

    overlaps = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        resources: ExitStack,
        doors: Mapping[int, int],
        bells: Mapping[int, int],
        timeout: float,
    ) -> None:
        self._group = group
        self._doors = doors
        self._bells = {bell: peer for peer, bell in bells.items()}
        self._poll = select.poll()
        for bell in bells.values():
            self._poll.register(bell, select.POLLIN)
        self._heard: dict[int, deque[tuple[int, int, int]]] = {bell: deque() for bell in bells.values()}
        self._waiting = False
        """Whether this rank has told something and not yet heard all: for good, where that failed."""
        self._timeout = timeout
        self._close = weakref.finalize(self, resources.close)

    @classmethod
    def connect(cls, group: dist.ProcessGroup | None = None) -> Self | None:
        """The transport; None, on every rank, where any rank cannot open the memory of another. Collective."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        # What is offered is closed here once the peers have it: a pipe then ends with the peer that writes to it.
        with ExitStack() as offered, ExitStack() as resources:
            bells: dict[int, int] = {}
            try:
                offer = _Offer(_make_memory(offered, 0), {})
                for peer in range(world):
                    if peer != rank:
                        bell, door = os.pipe()
                        bells[peer], offer.doors[peer] = _keep(resources, bell), _keep(offered, door)
                offers = _gather(offer, group)
            except OSError:
                offers = _gather(None, group)
            doors = {} if None in offers else _open_doors(rank, offers, resources)
            if not all(_gather(len(doors) == world - 1, group)):
                return None
            return cls(group, resources.pop_all(), doors, bells, _timeout(group))

    def stage(self, plan: Plan, device: torch.device, slots: int) -> Staging:
        """Buffers that the peers map. Two slots wherever there is more than one round: see the module's text."""
        if device.type != "cpu":
            raise ValueError(f"shared memory is a CPU's, and the tensors are on {device}")
        rank, count = dist.get_rank(self._group), min(2, max(1, len(plan.rounds)))
        slot = -(-staging_sizes(plan)[0] // ALIGNMENT) * ALIGNMENT
        offsets = [{message.peer: message.offset for message in one.sends} for one in plan.rounds]
        mapped: dict[int, list[torch.Tensor]] = {}
        with ExitStack() as opened:
            memory, problems = None, []
            try:
                memory = _make_memory(opened, count * slot)
            except OSError as error:
                problems.append(f"no {count * slot} bytes of shared memory for staging: {error}")
            told = _gather((memory, slot, offsets), self._group)
            arriving = _arriving(rank, [by_round for _, _, by_round in told])
            try:
                for peer in {rank, *arriving} if all(theirs for theirs, _, _ in told) else ():
                    theirs, size, _ = told[peer]
                    mapped[peer] = _map(theirs, size, count)
            except OSError as error:
                problems.append(f"staging of other ranks cannot be mapped: {error}")
            agree("the reshard cannot be run", problems)  # and what is closed now was opened by all
        return SharedStaging(mapped.pop(rank), mapped, arriving)

    def start(self, exchange: Exchange) -> None:
        """Tells all peers that this rank has packed. Raises TransportError where one of them has ended."""
        self._tell(_EXCHANGE, 0, 0)

    def finish(self) -> None:
        """Waits until all peers have told that they have packed."""
        if self._waiting:
            self._hear(_EXCHANGE)

    def highest(self, first: int, second: int) -> tuple[int, int]:
        """See `Transport.highest`. Raises TransportError where an exchange of this rank or of a peer was not ended."""
        self._tell(_AGREEMENT, first, second)
        told = self._hear(_AGREEMENT)
        return max(first, *(one for _, one, _ in told)), max(second, *(other for _, _, other in told))

    def close(self) -> None:
        """Closes the pipes; a peer that still waits for this rank sees that it has ended."""
        self._close()

    def _tell(self, *message: int) -> None:
        if self._waiting:
            raise _failed("one before it did not come to its end: make a new weight sync on all ranks")
        self._waiting = True
        ended = [peer for peer, door in self._doors.items() if not _write(door, _MESSAGE.pack(*message))]
        if ended:
            raise _failed(f"ranks {ended} have ended")

    def _hear(self, kind: int) -> list[tuple[int, int, int]]:
        """The next message of every peer, all of this kind."""
        deadline = time.monotonic() + self._timeout
        while not all(self._heard.values()):
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not events:
                late = [peer for bell, peer in self._bells.items() if not self._heard[bell]]
                raise _failed(f"ranks {late} did not come to it within {self._timeout:g} s")
            for bell, _ in events:
                self._read(bell)
        told = [messages.popleft() for messages in self._heard.values()]
        away = [peer for peer, message in zip(self._bells.values(), told, strict=True) if message[0] != kind]
        if away:
            raise _failed(f"ranks {away} did not join it")
        self._waiting = False
        return told

    def _read(self, bell: int) -> None:
        """One message, which may be the one after the next: a peer goes on when it has heard all, this rank or not."""
        message = os.read(bell, _MESSAGE.size)
        if message:
            self._heard[bell].append(_MESSAGE.unpack(message))
        elif self._heard[bell]:
            self._poll.unregister(bell)  # it had told what this rank waits for, and needs no more
        else:
            raise _failed(f"rank {self._bells[bell]} has ended")


def _failed(why: str) -> TransportError:
    return TransportError(f"the exchange with the other ranks failed: {why}")


def _write(door: int, message: bytes) -> bool:
    """A message through a pipe, which takes it whole; whether there is anybody at its end."""
    try:
        os.write(door, message)
    except BrokenPipeError:
        return False
    return True


def _make_memory(resources: ExitStack, nbytes: int) -> _Memory:
    """Memory of this size, with all of its pages, until the resources are closed. Raises OSError."""
    name = f"hybridrl-{secrets.token_hex(8)}"
    number = _keep(resources, os.memfd_create(name, os.MFD_CLOEXEC))
    if nbytes:
        os.posix_fallocate(number, 0, nbytes)  # rather than to die where a page is missing later
    return _Memory(os.getpid(), number, name)


def _open_doors(rank: int, offers: list[_Offer], resources: ExitStack) -> dict[int, int]:
    """By peer, the pipe that tells it; without those that cannot be opened from here."""
    doors = {}
    for peer, offer in enumerate(offers):
        if peer == rank:
            continue
        try:
            os.close(offer.memory.open())  # a process of that number may be another machine's: its memory's name is not
            path = f"/proc/{offer.memory.process}/fd/{offer.doors[rank]}"
            doors[peer] = _keep(resources, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            continue
    return doors


def _map(memory: _Memory, slot: int, count: int) -> list[torch.Tensor]:
    """The slots of a rank's memory, uint8; they keep it for as long as they live. Raises OSError."""
    if not slot:
        return [torch.empty(0, dtype=torch.uint8)] * count
    number = memory.open()
    try:
        mapped = mmap.mmap(number, count * slot, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(number)
    return list(torch.frombuffer(mapped, dtype=torch.uint8).split(slot))


def _arriving(rank: int, offsets: Sequence[Sequence[Mapping[int, int]]]) -> dict[int, dict[int, int]]:
    """By peer and round, where a message to the rank lies in the peer's buffer; from all ranks' offsets by receiver."""
    found: dict[int, dict[int, int]] = {}
    for peer, by_round in enumerate(offsets):
        own = {number: by_receiver[rank] for number, by_receiver in enumerate(by_round) if rank in by_receiver}
        if own:
            found[peer] = own
    return found


def _keep(resources: ExitStack, number: int) -> int:
    resources.callback(os.close, number)
    return number


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


def _timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that the group gives its collectives."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return float(backend.options._timeout.total_seconds())
