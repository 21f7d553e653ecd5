"""Saving: planned by all ranks together, written by each in a thread of its own, and named when all of it is whole.

1. Every rank copies what it is to write (without `checkpoint.asynchronous` it does not, and waits instead).
2. Each writes into `.writing-step-…`, syncs its files to disk and reads them back; a full disk is tried again.
3. When all have, rank 0 adds the index and the manifest, syncs them, and gives the folder its name. A reader never sees
   a checkpoint that is not whole.
4. Only then are older ones removed.

At most one save is in flight. Every method is collective, and no rank waits in a collective for another's disk.
"""

import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict

from hybridrl.checkpoint.files import HostCopies, Lent, RankWriter, sync_folder, with_retries
from hybridrl.checkpoint.manifest import CheckpointError, Manifest, Written, folder_of, write_manifest
from hybridrl.checkpoint.optimizer_state import slots, steps_made
from hybridrl.checkpoint.retention import ASIDE, remove_old
from hybridrl.checkpoint.shards import Model
from hybridrl.config.schema import CheckpointConfig

STATE_FILE = "state.pt"
POLL_S = 0.02
TOLD_S = 30.0
"""Between words about a save that is waited for."""
SOFTWARE = ("hybridrl", "torch", "megatron-core", "transformers")


@dataclass
class _Flight:
    """A save that is being written."""

    manifest: Manifest
    aside: Path
    writer: RankWriter
    metadata: Any
    """Of the whole checkpoint; None but on rank 0."""
    error: BaseException | None = None
    thread: threading.Thread | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def written(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()


class Saver:
    """Writes checkpoints into `parent`.

    `note` tells a person something, from any thread. `lend` is that of `HostCopies`.
    """

    def __init__(
        self,
        parent: Path,
        config: CheckpointConfig,
        rank: int,
        note: Callable[[str], None],
        lend: Callable[[], Sequence[Lent]] | None = None,
    ) -> None:
        self.parent = parent
        self._config = config
        self._rank = rank
        self._note = note
        self._copies = HostCopies(lend) if config.asynchronous else None
        self._flight: _Flight | None = None
        self._late = -1
        """A rank that had not written its part at the last look."""
        self._device = torch.device(torch.cuda.current_device()) if dist.get_backend() == "nccl" else None

    @property
    def in_flight(self) -> int | None:
        """The step that is being written."""
        return None if self._flight is None else self._flight.manifest.step

    def check_place(self) -> None:
        """Makes the folder. Raises CheckpointError, on all ranks, where any of them cannot write there."""
        problem = self._on_first(lambda: self.parent.mkdir(parents=True, exist_ok=True))
        dist.barrier()
        if problem is None:
            problem = self._tried(lambda: tempfile.TemporaryFile(dir=self.parent).close())
        self._agree(f"checkpoints cannot be written to {self.parent}", problem)

    def start(
        self, step: int, models: Sequence[Model], states: tuple[dict[str, Any], dict[str, Any]], metric: float | None
    ) -> None:
        """Begins to save; returns when everything may change again. Waits for an earlier save first.

        `states` are those of `States.collect`. Raises CheckpointError on all ranks if the folder cannot be made.
        """
        self.wait()
        aside = self.parent / f"{ASIDE}{folder_of(self.parent, step).name}"
        self._agree(self._failed(step), self._on_first(lambda: _make(aside)))
        own: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(_bytes(states[1]), own if self._rank == 0 else None)
        extra = _extra(states[0], own) if self._rank == 0 else {}
        writer = RankWriter(aside, self._rank, self._copies, extra)
        shards = {k: s for model in models for k, s in (*_owned(model, "weights"), *_owned(model, "optimizer_state"))}
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(shards), writer, None, 0, planner=planner
        )
        manifest = Manifest(
            step=step,
            world=dist.get_world_size(),
            metric=metric,
            models=_everywhere({model.name: _described(model) for model in models}),
            versions={name: version(name) for name in SOFTWARE},
        )
        flight = _Flight(manifest, aside, writer, metadata)
        flight.thread = threading.Thread(target=self._write, args=(flight,), name=f"checkpoint-{step}", daemon=True)
        flight.thread.start()
        self._flight = flight
        if not self._config.asynchronous:
            self.wait()

    def poll(self) -> Path | None:
        """The checkpoint, if the save in flight has just become whole on all ranks; None while it has not.

        Raises CheckpointError on all ranks where it failed on any.
        """
        flight = self._flight
        if flight is None:
            return None
        late = torch.tensor([-1 if flight.written else self._rank], dtype=torch.int32, device=self._device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        self._late = int(late.item())
        if self._late >= 0:
            return None
        self._flight = None
        problem = _reason(flight.error, flight.writer.nbytes, self.parent)
        self._agree(self._failed(flight.manifest.step), problem, flight.aside)
        return self._commit(flight)

    def wait(self) -> Path | None:
        """The same, when the save in flight has ended. A rank that keeps the others waiting is told."""
        told = time.monotonic()
        while (flight := self._flight) is not None:
            if (found := self.poll()) is not None:
                return found
            if time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                self._note(
                    f"the checkpoint of step {flight.manifest.step} is waited for: rank {self._late} still writes"
                )
            time.sleep(POLL_S)
        return None

    def _write(self, flight: _Flight) -> None:
        try:
            self._retried(flight.writer.write, flight.manifest.step)
        except BaseException as error:  # noqa: BLE001  it is raised where the ranks agree on it
            flight.error = error
        finally:
            if self._copies is not None:
                self._copies.end()

    def _commit(self, flight: _Flight) -> Path:
        told: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((flight.writer.results, flight.writer.files), told if self._rank == 0 else None)
        step, folder = flight.manifest.step, folder_of(self.parent, flight.manifest.step)

        def finish() -> None:
            flight.writer.finish_metadata(flight.metadata, [results for results, _ in told])
            files: dict[str, Written] = {name: w for _, some in told for name, w in some.items()}
            write_manifest(
                flight.aside, Manifest(**{**vars(flight.manifest), "files": {**files, **flight.writer.files}})
            )
            sync_folder(flight.aside)
            os.rename(flight.aside, folder)
            sync_folder(self.parent)

        self._agree(self._failed(step), self._on_first(finish), flight.aside)
        if self._rank == 0:
            try:
                remove_old(self.parent, self._config)
            except OSError as error:
                self._note(f"an old checkpoint could not be removed: {error}")
        return folder

    def _retried(self, attempt: Callable[[], None], step: int) -> None:
        def told(text: str) -> None:
            self._note(f"rank {self._rank}: the checkpoint of step {step} could not be written: {text}")

        with_retries(attempt, self._config.retries, self._config.retry_wait_s, told)

    def _on_first(self, attempt: Callable[[], None]) -> str | None:
        """What keeps rank 0 from doing it, after retries; None on other ranks, which do nothing."""
        return self._tried(attempt) if self._rank == 0 else None

    def _tried(self, attempt: Callable[[], None]) -> str | None:
        """What keeps this rank from doing it, after retries."""
        try:
            with_retries(attempt, self._config.retries, self._config.retry_wait_s, self._note)
        except OSError as error:
            return _reason(error, 0, self.parent)
        return None

    def _failed(self, step: int) -> str:
        return f"the checkpoint of step {step} could not be written to {self.parent}; those that were whole still are"

    def _agree(self, what: str, problem: str | None, aside: Path | None = None) -> None:
        """Raises CheckpointError on all ranks where any has a problem; what was written aside is gone then."""
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, problem)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if not found:
            return
        if aside is not None and self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        raise CheckpointError("\n".join([what, *found]))


def _make(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _owned(model: Model, what: str) -> Sequence[tuple[str, Any]]:
    return list(getattr(model, what)(owned=True).items())


def _described(model: Model) -> dict[str, Any]:
    """What there is of a model beside its weights on this rank."""
    kinds = {kind for slot in slots(model.optimizer, model.tensors()) for kind in slot.values()}
    return {"kinds": sorted(kinds), "step": steps_made(model.optimizer)}


def _everywhere(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same of all ranks together: a rank may have no part of the optimizer."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, described)
    return {
        name: {
            "kinds": sorted({kind for one in everyone for kind in one[name]["kinds"]}),
            "step": max(one[name]["step"] for one in everyone),
        }
        for name in described
    }


def _extra(shared: dict[str, Any], own: Sequence[bytes]) -> dict[str, bytes]:
    """Rank 0's further files: the states, and what marks the folder as one of Megatron's."""
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
    return {
        STATE_FILE: _bytes({"shared": shared, "per_rank": list(own)}),
        "common.pt": _bytes({}),
        "metadata.json": config,
    }


def _bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _reason(error: BaseException | None, nbytes: int, parent: Path) -> str | None:
    if error is None:
        return None
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        try:
            text += f" ({nbytes:,} bytes to write, {shutil.disk_usage(parent).free:,} free on its disk)"
        except OSError:
            text += f" ({nbytes:,} bytes to write)"
    return text
