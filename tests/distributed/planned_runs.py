"""What the dry run's tests measure on ranks: bytes that an actor really holds."""

import ctypes
import gc
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hybridrl.memory.ledger import take_peak
from hybridrl.memory.pages import resident_bytes
from hybridrl.training.losses import make_loss
from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def _storages(tensors: Any) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held(folder: Any, **options: dict[str, Any]) -> dict[str, int]:
    """Bytes of each owner on this rank after an update."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(), actor)
    actor.update(rows, make_loss(actor.config.algorithm, 16))
    parts = actor.optimizer.inner.chained_optimizers
    shards = {id(p): p for part in parts for group in part.optimizer.param_groups for p in group["params"]}
    states = [part.optimizer.state[p] for part in parts for p in part.optimizer.state]
    buffers = [b for chunk in actor._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    low = actor.config.model.dtype != "float32"
    return {
        "parameters": _storages(actor.tensors().values()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "masters": _storages(shards.values()) if low else 0,
        "moments": sum(_storages([s["exp_avg"], s["exp_avg_sq"]]) for s in states),
    }


class _Saved:
    """Bytes of the storages that autograd holds for backward passes, and the most of them so far."""

    def __init__(self, apart: set[int]) -> None:
        self.apart, self.now, self.most = apart, 0, 0
        self._holders: dict[int, int] = {}

    def hooks(self) -> AbstractContextManager[None]:
        """Counts what is saved inside, until it is released."""

        class Held:
            def __init__(held, tensor: torch.Tensor) -> None:  # noqa: N805  `self` is the counter
                storage = tensor.untyped_storage()
                held.tensor, held.place, held.nbytes = tensor, storage.data_ptr(), storage.nbytes()
                self._add(held.place, held.nbytes)

            def __del__(held) -> None:  # noqa: N805
                self._drop(held.place, held.nbytes)

        def pack(tensor: torch.Tensor) -> torch.Tensor | Held:
            return tensor if tensor.untyped_storage().data_ptr() in self.apart else Held(tensor)

        return saved_tensors_hooks(pack, lambda kept: kept.tensor if isinstance(kept, Held) else kept)

    def _add(self, place: int, nbytes: int) -> None:
        self._holders[place] = self._holders.get(place, 0) + 1
        self.now += nbytes * (self._holders[place] == 1)
        self.most = max(self.most, self.now)

    def _drop(self, place: int, nbytes: int) -> None:
        self._holders[place] -= 1
        self.now -= nbytes * (self._holders[place] == 0)


def saved(folder: Any, lengths: tuple[int, ...], **options: dict[str, Any]) -> tuple[int, int]:
    """The most bytes that autograd holds in an update on rows of these lengths, and its micro-batches."""
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(lengths=lengths), actor)
    counter = _Saved({t.untyped_storage().data_ptr() for t in actor.tensors().values()})
    passes, steps = actor._passes.run, []

    def counted(rows: Any, plan: Any, *rest: Any, **options: Any) -> None:
        steps.append(plan.steps)
        with counter.hooks():
            passes(rows, plan, *rest, **options)

    actor._passes.run = counted  # type: ignore[method-assign]
    actor.update(rows, make_loss(actor.config.algorithm, 16))
    return counter.most, steps[0]


def resident(folder: Any, lengths: tuple[int, ...], **options: dict[str, Any]) -> int:
    """By how many bytes this process grows, at most, from before there is a model to the end of its second update."""
    libc = ctypes.CDLL(None)
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # what is freed goes back at once
        libc.mallopt(threshold, 1 << 16)
    gc.collect()
    libc.malloc_trim(0)  # nothing of an earlier test is left to be used again
    before = resident_bytes()
    actor = make_actor(folder, **options)
    rows = with_old_log_probs(make_rows(lengths=lengths), actor)
    loss = make_loss(actor.config.algorithm, 16)
    actor.update(rows, loss)
    take_peak(torch.device("cpu"))
    actor.update(rows, loss)
    return take_peak(torch.device("cpu")) - before


def peaks_start_afresh() -> bool:
    """Whether the kernel lets a process begin a new peak of its memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def program_bytes() -> int:
    """What this process takes before it has a model, with all that a run imports."""
    import hybridrl.train  # noqa: F401

    return resident_bytes()
