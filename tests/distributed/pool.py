"""A pool of worker processes that stay alive across tests, so that a rank's start-up is paid once.

`pool.run(function, world=2, **kwargs)` calls `function(**kwargs)` on the first `world` workers inside a fresh gloo
world (`torch.distributed` is initialised before and destroyed after, Megatron's state with it) and returns the list of
results in rank order. The function must be importable (module level). If any rank raises, `WorkerError` carries every
rank's traceback; the workers serve on if all of them can leave the world soon, else all are replaced.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from hybridrl.rollout.sglang.process.guard import die_with

START_S = 180.0
GRACE_S = 20.0
"""After the first failure the other ranks have this long to tell theirs."""
COLLECTIVE = timedelta(seconds=240)
"""A collective that waits longer for a rank fails, and says which one it was."""
LEAVE_S = 10.0
"""How long a rank that failed may take to leave its world."""


class WorkerError(RuntimeError):
    """A rank of the pool raised, died or did not answer in time."""


def _serve(pipe: Connection, parent: int) -> None:
    die_with(parent)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        function, kwargs, rank, world, store = job
        for key, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            os.environ[key] = str(value)
        try:
            rendezvous = dist.FileStore(store, world)
            torch.set_num_threads(1)  # whatever a job before has made of it
            dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world, timeout=COLLECTIVE)
            dist.barrier()  # one that is through early must not leave while others still connect to it
            result = function(**kwargs)
            _leave_world()
            pipe.send((True, result))
            continue
        except BaseException:  # noqa: BLE001  whatever it was, the test is told
            pipe.send((False, traceback.format_exc()))
        # Told first: ranks that wait for this one fail when its connections close.
        _leave_world()
        pipe.send("left")


_imported = [0]
"""How many modules there were when objects were last left out of the garbage collector's sight."""


def _leave_world() -> None:
    import gc
    import sys

    import torch.distributed as dist

    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _empty_optimizers()
    # Each gloo group has threads of its own, which end when nothing refers to it any more: models refer to theirs in
    # cycles.
    gc.collect()
    if len(sys.modules) != _imported[0]:
        gc.freeze()  # what was imported stays, and is half a million objects to look through each time
        _imported[0] = len(sys.modules)


def _empty_optimizers() -> None:
    """Megatron's optimizers hold views of parameters, and these, by autograd's nodes, the hooks of the model: a cycle
    through C++ that no garbage collector sees. Emptied here, they let go of the model and its groups."""
    import gc
    import sys

    import torch

    module = sys.modules.get("megatron.core.optimizer.optimizer")
    kinds = (torch.optim.Optimizer,) if module is None else (torch.optim.Optimizer, module.MegatronOptimizer)
    # `isinstance` would ask each object for its class, which a proxy of what is gone answers with an error.
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), kinds)]:
        for value in vars(optimizer).values():
            if isinstance(value, dict | list):
                value.clear()


class WorkerPool:
    """At most `size` workers, started when first needed and kept until `close`."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hybridrl-pool-")
        self._jobs = 0

    def run(self, function: Callable[..., Any], world: int, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Runs `function(**kwargs)` on `world` ranks; results in rank order. Results must be picklable."""
        if world > self.size:
            raise ValueError(f"the pool has {self.size} workers, {world} were asked for")
        fresh = world > len(self._workers)
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._jobs += 1
        store = f"{self._folder.name}/{self._jobs}"
        for rank in range(world):
            self._workers[rank][1].send((function, kwargs, rank, world, store))
        return self._collect(world, timeout + (START_S if fresh else 0.0))

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        grace = GRACE_S
        while len(results) + len(failures) < world:
            for rank in range(world):
                process, pipe = self._workers[rank]
                if rank in results or rank in failures:
                    continue
                try:
                    if pipe.poll(0.02):
                        ok, value = pipe.recv()
                        (results if ok else failures)[rank] = value
                    elif not process.is_alive():
                        failures[rank] = f"the process ended with exit code {process.exitcode}"
                except EOFError:
                    process.join(1)
                    failures[rank] = f"the process closed its pipe; exit code {process.exitcode}"
                if failures:
                    deadline = min(deadline, time.monotonic() + grace)
                    grace = max(0.0, deadline - time.monotonic())
            if time.monotonic() > deadline:
                for rank in set(range(world)) - set(results) - set(failures):
                    failures[rank] = "no answer in time"
        if failures:
            if not self._all_left(set(failures)):
                self.close()
                self._folder = tempfile.TemporaryDirectory(prefix="hybridrl-pool-")
            raise WorkerError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(world)]

    def _all_left(self, failed: set[int]) -> bool:
        """Whether the ranks that failed are ready for another world; those that hang or died are not."""
        deadline = time.monotonic() + LEAVE_S
        try:
            return all(
                self._workers[rank][1].poll(max(0.0, deadline - time.monotonic()))
                and self._workers[rank][1].recv() == "left"
                for rank in failed
            )
        except (EOFError, OSError):
            return False

    def close(self) -> None:
        """Ends all workers, at once: what they have started ends with them."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
        self._folder.cleanup()
