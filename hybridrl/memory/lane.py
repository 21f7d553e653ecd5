"""Copies that run beside everything else, in order: a side stream on a GPU, a thread on a CPU.

    fence = lane.copy(pairs)      returns at once
    fence.wait()                  before a target is read, or a source is written or freed

On a GPU `wait` holds the caller's stream, not the caller: what is enqueued afterwards sees the copies.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Target and source, flat, of one dtype and length."""


class Fence(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Until it has returned, the copies may be running. Raises what they raised. More than once is as once."""

    @property
    def seconds(self) -> float:
        """Time that the copies took; blocks until they have ended."""

    @property
    def exposed(self) -> float:
        """Those seconds that `wait` was blocked for."""


class Lane(Protocol):
    """One direction-less queue of copies; see `make_lane`."""

    def copy(self, pairs: Sequence[Pair]) -> Fence:
        """Starts the copies, after all copies before and after what the caller's stream holds now."""

    def close(self) -> None:
        """Ends it, when all copies have ended."""


def make_lane(device: torch.device) -> Lane:
    """A lane for copies from and to `device`."""
    return _StreamLane(device) if device.type == "cuda" else _ThreadLane()


class _ThreadLane:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybridrl-lane")

    def copy(self, pairs: Sequence[Pair]) -> Fence:
        return _Task(self._thread.submit(_timed_copy, list(pairs)))

    def close(self) -> None:
        self._thread.shutdown()


class _Task:
    def __init__(self, future: "Future[float]") -> None:
        self._future = future
        self.exposed = 0.0

    def wait(self) -> None:
        started = time.perf_counter()
        self._future.result()
        self.exposed += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        return self._future.result()


def _timed_copy(pairs: Iterable[Pair]) -> float:
    started = time.perf_counter()
    for target, source in pairs:
        target.copy_(source)
    return time.perf_counter() - started


class _StreamLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[Pair]) -> Fence:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        return _Events(begin, end)

    def close(self) -> None:
        self._stream.synchronize()


class _Events:
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end
        self._blocked: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self) -> None:
        """Two more events on the caller's stream say afterwards how long it stood here."""
        stood = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        stood[0].record()
        torch.cuda.current_stream().wait_event(self._end)
        stood[1].record()
        self._blocked.append(stood)

    @property
    def seconds(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3

    @property
    def exposed(self) -> float:
        for _, end in self._blocked:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._blocked) / 1e3
