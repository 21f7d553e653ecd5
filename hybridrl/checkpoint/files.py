"""The files of one checkpoint as one rank writes them, from a copy in host memory, in any thread.

The format is Megatron's `torch_dist` (torch.distributed.checkpoint), so `megatron.core.dist_checkpointing.load` reads
what this writes. Megatron's own writer forks the training process, which CUDA, threads and open connections do not
take well, and leaves checksums and retries out.
"""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hybridrl.checkpoint.manifest import HashingFile, Written, digest_of, file_problems

Content = Mapping[str, bytes]
"""Further files: their bytes by name."""


class Lent(Protocol):
    """Copies in host memory that somebody else has made, and keeps as they are until `end`."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a tensor, None where there is none."""

    def end(self) -> None:
        """They are not read any more. Called from any thread, maybe more than once."""


class HostCopies:
    """Tensors in host memory, as they are at the time of a copy. Room is kept from one save to the next, pinned where
    tensors come from a GPU.

    `lend`, called once a save, gives copies that are there already: these are taken as they are.
    """

    def __init__(self, lend: Callable[[], Sequence[Lent]] | None = None) -> None:
        self._lend = lend
        self._lent: Sequence[Lent] = ()
        self._room: dict[Any, torch.Tensor] = {}

    def take(self, tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Copies of these, by the same keys; whole when this returns, and to be read until `end`."""
        self._lent = self._lend() if self._lend is not None else ()
        lent = {key: self._lent_copy(tensor) for key, tensor in tensors.items()}
        own = self._copies({key: tensor for key, tensor in tensors.items() if lent[key] is None})
        return {key: own[key] if copy is None else copy for key, copy in lent.items()}

    def end(self) -> None:
        """The copies are not read any more."""
        for one in self._lent:
            one.end()

    def _lent_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return next((copy for one in self._lent if (copy := one.of(tensor)) is not None), None)

    def _copies(self, tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        room: dict[Any, torch.Tensor] = {}
        for key, tensor in tensors.items():
            had = self._room.get(key)
            if had is None or had.shape != tensor.shape or had.dtype != tensor.dtype:
                had = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            room[key] = had.copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._room = room
        return room


class RankWriter(FileSystemWriter):
    """Writes this rank's tensors into one file, and `extra` beside it. One a save.

    With `copies` the tensors are copied when the plan is made, so that they may change while `write` runs; without,
    they are read as they are then.
    """

    can_run_decentralized_global_plan = True

    def __init__(self, folder: Path, rank: int, copies: HostCopies | None, extra: Content) -> None:
        super().__init__(folder)
        self.folder = folder
        self._rank = rank
        self._copies = copies
        self._extra = extra
        self._items: Sequence[tuple[WriteItem, torch.Tensor]] = ()
        self.results: list[WriteResult] = []
        """Where each tensor lies, once written."""
        self.files: dict[str, Written] = {}

    @property
    def nbytes(self) -> int:
        """Of this rank's tensors and further files."""
        return sum(value.nbytes for _, value in self._items) + sum(map(len, self._extra.values()))

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        """A rank's files have names of their own, so nothing need be agreed upon."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolves the tensors of the plan, and copies them if this writer is to."""
        found = {item.index: cast(torch.Tensor, planner.resolve_data(item)).detach() for item in plan.items}
        held = self._copies.take(found) if self._copies is not None else found
        self._items = [(item, held[item.index]) for item in plan.items]

    def write(self) -> None:
        """Writes everything, syncs it to disk, and reads it back. Raises OSError."""
        self.results, self.files = [], {}
        if self._items:
            name = f"__{self._rank}_0.distcp"
            with closing(HashingFile((self.folder / name).open("wb"))) as stream:
                self.results = [self._write_one(stream, item, value, name) for item, value in self._items]
            self.files[name] = stream.written
        for name, content in self._extra.items():
            self.files[name] = write_file(self.folder / name, content)
        problems = file_problems(self.folder, self.files, self.files)
        if problems:
            raise OSError(errno.EIO, "what was read back is not what was written: " + "; ".join(problems))

    def _write_one(self, stream: HashingFile, item: WriteItem, value: torch.Tensor, name: str) -> WriteResult:
        host = value.to("cpu").contiguous()
        if host.untyped_storage().nbytes() != host.nbytes:
            host = host.clone()  # torch.save would write all of the storage
        try:
            return _write_item(self.transforms, stream, host, item, name, SerializationFormat.TORCH_SAVE)  # type: ignore[arg-type]
        except RuntimeError as error:
            if stream.failed is not None:  # torch tells of its own writer instead
                raise stream.failed from error
            raise

    def finish_metadata(self, metadata: Metadata, results: Sequence[list[WriteResult]]) -> None:
        """Adds the index of all ranks' tensors. On one rank."""
        self.finish(metadata, list(results))
        path = self.folder / ".metadata"
        self.files[path.name] = written(path)


def write_file(path: Path, content: bytes) -> Written:
    """Writes a file and syncs it to disk."""
    with closing(HashingFile(path.open("wb"))) as stream:
        stream.write(content)
    return stream.written


def written(path: Path) -> Written:
    """What a file that somebody else wrote holds, synced to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return Written(path.stat().st_size, digest_of(path))


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_retries(attempt: Callable[[], None], retries: int, wait_s: float, told: Callable[[str], None]) -> None:
    """Calls `attempt`, again after each OSError, `retries` times at most; then the error is raised."""
    for left in range(retries, -1, -1):
        try:
            attempt()
        except OSError as error:
            if not left:
                raise
            told(f"{error}; {left} more attempts, the next in {wait_s:g} s")
            time.sleep(wait_s)
        else:
            return
