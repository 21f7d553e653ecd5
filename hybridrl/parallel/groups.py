"""Process groups: the one world, and Megatron's groups over it as one value.

Megatron holds its groups in globals of `megatron.core.parallel_state`; this module makes them from `ParallelSizes`, and
hands them out by the field's names.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel import compat  # isort: skip - must precede megatron.core

from megatron.core import parallel_state, tensor_parallel

from hybridrl.parallel.device import backend
from hybridrl.parallel.rendezvous import fresh, shared_store
from hybridrl.parallel.sizes import Coordinates, ParallelSizes

TIMEOUT_S = 1800.0
"""After which a collective that waits for a rank fails."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's place and its process groups."""

    sizes: ParallelSizes
    rank: int
    """In the world."""
    coordinates: Coordinates
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    """Replicas of the dense weights, without context parallelism."""
    dp_cp: dist.ProcessGroup
    """Ranks over which dense gradients are summed."""
    tp_pp: dist.ProcessGroup
    """The ranks that hold one copy of the dense weights together."""
    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    edp: dist.ProcessGroup
    """Ranks over which expert gradients are summed."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.coordinates.pp == self.sizes.pp - 1


def start_world(device: torch.device, *, timeout_s: float = TIMEOUT_S) -> None:
    """Makes the `torch.distributed` world that torchrun describes in the environment, or a world of one without it.

    `timeout_s` is the time after which a collective that waits for a rank fails.
    """
    limit = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        store = shared_store(os.environ, limit)
        if store is None:
            dist.init_process_group(backend(device), timeout=limit)
            return
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = fresh(store, rank, world, limit)
        dist.init_process_group(backend(device), store=own, rank=rank, world_size=world, timeout=limit)
        return
    dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def initialize(sizes: ParallelSizes, *, vpp: int = 1, seed: int = 0, timeout_s: float = TIMEOUT_S) -> Groups:
    """Makes Megatron's groups on the existing world, and seeds its random states from `seed`.

    `timeout_s` is that of `start_world`, for the collectives of the groups.

    Installs the patches of `hybridrl.parallel.compat`. Raises RuntimeError where there is no world, where groups exist
    already, or where the world has not `sizes.world` ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no torch.distributed world: call start_world(device) first")
    if dist.get_world_size() != sizes.world:
        raise RuntimeError(f"the world has {dist.get_world_size()} ranks, the sizes are for {sizes.world}: {sizes}")
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("Megatron's groups exist already: call shutdown() before initialize()")
    compat.install()
    _make(sizes, vpp, timeout_s)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return current()


def _make(sizes: ParallelSizes, vpp: int, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )


def current() -> Groups:
    """The groups that `initialize` made. RuntimeError where there are none."""
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("Megatron's groups do not exist: call initialize(sizes) first")
    sizes = ParallelSizes(
        world=dist.get_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    return Groups(
        sizes=sizes,
        rank=dist.get_rank(),
        coordinates=sizes.coordinates(dist.get_rank()),
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tp_pp=parallel_state.get_model_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        edp=parallel_state.get_expert_data_parallel_group(),
    )


def random_states() -> Any:
    """Megatron's tracker of named random states."""
    return tensor_parallel.get_cuda_rng_tracker()


def shutdown(*, world: bool = False) -> None:
    """Destroys Megatron's groups, and with `world` the world too. Does nothing where there are none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if world and dist.is_initialized():
        dist.destroy_process_group()


def _state() -> dict[str, Any]:
    """Megatron's globals: all that says which groups are in force."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}


def _put(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(parallel_state, name, value)


_UNMADE = {name: copy(value) for name, value in _state().items()}


class OtherGroups:
    """Megatron's groups of a further model on the same world, which is cut otherwise. Made by all ranks together.

    Everything that Megatron does with that model must happen inside `in_force`.
    """

    def __init__(self, sizes: ParallelSizes, *, vpp: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        own = _state()
        _put({name: copy(value) for name, value in _UNMADE.items()})
        try:
            _make(sizes, vpp, timeout_s)
            self._others = _state()
        finally:
            _put(own)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """These groups in the place of those that are in force outside."""
        own = _state()
        _put(self._others)
        try:
            yield
        finally:
            self._others = _state()
            _put(own)
