"""All ranks go on, or none does: a small collective before a sync and after it."""

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hybridrl.reshard.transports import Transport, TransportError


class SyncError(RuntimeError):
    """A weight sync that did not happen or did not end; raised on every rank alike.

    `problems` has a line for each reason, from all ranks. `touched` says whether destination parameters may have been
    written: where False they hold what they held, where True they must not be used before a later sync succeeds.
    """

    def __init__(self, what: str, problems: list[str], *, touched: bool) -> None:
        self.problems = tuple(problems)
        self.touched = touched
        super().__init__("\n  ".join([f"{what}:", *problems]))


FAILED = 2**62
"""More than any version, and than the negative of any."""


class Outcome:
    """Keeps the first error of a sync, so that this rank can still take part in what the others wait for.

    `with outcome:` around each piece of work; once `failed`, leave out further work but no exchange.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether an error was kept."""
        return self.error is not None

    @property
    def text(self) -> str:
        """The error in a line; empty where there is none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


class Agreement:
    """Tells every rank of the world whether all are well and mean the same version.

    Costs a message of the transport's, or one all-reduce, of a few numbers, and gathers texts only where there is
    something to tell.

    Args:
        device: where the world's collectives want their tensors.
        transport: what may be quicker than they. Where it fails, they have the last word.
    """

    def __init__(self, device: torch.device, transport: Transport) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._flags = torch.zeros(2, dtype=torch.int64, device=device)
        self._first, self._second = self._flags.unbind()
        self._transport = transport

    def settle(self, version: int, problem: str = "") -> list[str]:
        """The problems of all ranks, alike on all; empty where all are well. Collective."""
        if self._alone:
            return [problem] if problem else []
        try:
            highest = self._highest(version, problem)
        except TransportError as error:
            problem = problem or str(error)
            highest = self._reduce(version, problem)
        if highest == (version, -version):
            return []
        told: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(told, (problem, version))
        found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        versions = {rank: one for rank, (_, one) in enumerate(told)}
        if len(set(versions.values())) > 1:
            found.append(f"ranks were called for different versions: {versions}")
        return found

    def _highest(self, version: int, problem: str) -> tuple[int, int]:
        """The highest version and the highest of their negatives; a problem counts as a version that none is."""
        first, second = _claim(version, problem)
        found = self._transport.highest(first, second)
        return self._reduce(version, problem) if found is None else found

    def _reduce(self, version: int, problem: str) -> tuple[int, int]:
        first, second = _claim(version, problem)
        self._first.fill_(first)
        self._second.fill_(second)
        dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        first, second = self._flags.tolist()
        return first, second


def _claim(version: int, problem: str) -> tuple[int, int]:
    return (FAILED, FAILED) if problem else (version, -version)
