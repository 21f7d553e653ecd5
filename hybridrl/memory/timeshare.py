"""One device, shared in time: who owns what on it, what leaves, and where it goes; put together once, at the start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.sections.memory import MemoryConfig
from hybridrl.memory.arena import Arenas
from hybridrl.memory.lane import make_lane
from hybridrl.memory.ledger import Ledger
from hybridrl.memory.pages import return_what_is_freed
from hybridrl.memory.parcel import Parcel
from hybridrl.memory.phases import HybridEngine, RolloutEngine
from hybridrl.memory.policies import Places, Sizes, choose
from hybridrl.memory.region import Region
from hybridrl.memory.residence import Gradients, OptimizerState, Residence, WholeState
from hybridrl.memory.visit import Visitor, visitor_bytes
from hybridrl.memory.weights import KeptWeights, OffloadedWeights, Sync, Weights, parcel_bytes, unshared


class Trained(Protocol):
    """A model that is trained."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Its chunks in Megatron's DistributedDataParallel."""

    @property
    def megatron_optimizer(self) -> Any: ...

    @property
    def moments(self) -> int:
        """Moments that the optimizer keeps of a parameter."""

    def tensors(self) -> Mapping[str, Tensor]: ...

    def reside(self, residence: Residence) -> None:
        """Has it ask `residence` from now on."""


class Served(RolloutEngine, Protocol):
    """An engine with parameters."""

    def parameters(self) -> Mapping[str, Tensor]: ...


class TimeShare:
    """The device of this rank, between one trainer and one engine. Collective; close it at the end.

    Args:
        memory: what leaves, and where to.
        policy: it has the device first.
        engine: awake.
        sync: brings the policy's weights into it; or `single`, which also brings them back.
        staging: buffers of the sync.
        regions: memory that comes and goes page by page, in which the policy's parameters lie, and the engine's.
        device, device_bytes: a GPU and its memory; None on a CPU.
        folder: of the arena's files.
        reference: whether a reference of the policy is wanted.
        critic: a further model that is trained, and that leaves whole.
        give_back: see `HybridEngine`.

    Raises ArenaError on all ranks where what leaves finds no room.
    """

    def __init__(
        self,
        memory: MemoryConfig,
        policy: Trained,
        engine: Served,
        sync: Sync | Weights,
        *,
        staging: Callable[[], Iterable[Tensor]],
        regions: tuple[Region | None, Region | None] = (None, None),
        device: torch.device,
        device_bytes: int | None,
        folder: Path,
        reference: bool = False,
        critic: Trained | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self._memory = memory
        if device.type == "cpu":
            return_what_is_freed()
        state = OptimizerState(policy.megatron_optimizer, lambda: policy.tensors().values())
        gradients = Gradients(policy.chunks, policy.megatron_optimizer)
        served = list(engine.parameters().values())
        self.ledger = Ledger(device)
        self.ledger.own("parameters", lambda: _held(policy.tensors().values(), *regions))
        self.ledger.own("gradients", gradients.tensors)
        self.ledger.own("master weights", state.masters)
        self.ledger.own("moments", lambda: [moment for kind in state.moments() for moment in kind])
        self.ledger.own("engine weights", lambda: _held(served, *reversed(regions)))
        self.ledger.own("KV cache", lambda: engine.cache_bytes)
        self.ledger.own("staging", staging)

        leaving = unshared(policy.tensors().values(), served) if memory.parameters == "offload" else []
        planned = {"optimizer": state.planned_bytes(policy.moments)}
        planned |= {"reference": visitor_bytes(policy.tensors())} if reference else {}
        planned |= {"critic": self._own_critic(critic)} if critic is not None else {}
        self.places = self._choose(planned, parcel_bytes(leaving), device_bytes)
        wanted: dict[str, dict[str, int]] = {"host": {}, "disk": {}, "none": {}}
        for owner, nbytes in planned.items():
            wanted[getattr(self.places, owner)][owner] = nbytes
        if leaving:
            wanted[memory.arena]["parameters"] = parcel_bytes(leaving)
        del wanted["none"]
        self.arenas = Arenas(wanted, folder, dist.get_rank(), pin=device.type == "cuda")
        self._sizes = {owner: nbytes for sizes in wanted.values() for owner, nbytes in sizes.items()}
        self._lane = make_lane(device)

        weights = self._weights(sync, leaving)
        self.hybrid = HybridEngine(engine, weights, self.ledger, barrier=dist.barrier, give_back=give_back)
        self._residence = self.hybrid.attach(
            "policy",
            state,
            gradients if memory.gradients == "release" else None,
            self._parcel("optimizer", self.places.optimizer, join=True) if self.places.optimizer != "none" else None,
            prefetch=memory.prefetch,
        )
        policy.reside(self._residence)
        if critic is not None:
            self._attach_critic(critic)

    def _own_critic(self, critic: Trained) -> int:
        """Enters the critic into the ledger; the bytes of all that may leave of it."""
        self._critic_state = WholeState(critic.megatron_optimizer, lambda: critic.tensors().values())
        self._critic_gradients = Gradients(critic.chunks, critic.megatron_optimizer)
        state, gradients = self._critic_state, self._critic_gradients
        self.ledger.own("critic", lambda: [*(t for group in state.groups() for t in group), *gradients.tensors()])
        return state.planned_bytes(critic.moments)

    def _attach_critic(self, critic: Trained) -> None:
        place = self.places.critic
        residence = self.hybrid.attach(
            "critic",
            self._critic_state,
            self._critic_gradients if self._memory.gradients == "release" else None,
            self._parcel("critic", place, join=False) if place != "none" else None,
            prefetch=self._memory.prefetch,
        )
        critic.reside(residence)

    def visitor(self, hosts: Mapping[str, Tensor]) -> Visitor | None:
        """The reference's place in the arena, to visit `hosts` from; None where it stays on the device."""
        if self.places.reference == "none":
            return None
        section = self.arenas.section(self.places.reference, "reference", self._sizes["reference"])
        return Visitor(hosts, section, self._residence.before_forward)

    def close(self) -> None:
        """Ends the copies and gives the arenas up."""
        self._lane.close()
        self.arenas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _choose(self, planned: Mapping[str, int], leaving: int, device_bytes: int | None) -> Places:
        held = self.ledger.count()
        sizes = Sizes(
            parameters=held["parameters"] - leaving,
            engine=held["engine weights"],
            cache=held["KV cache"],
            staging=held["staging"],
            optimizer=planned["optimizer"],
            reference=planned.get("reference", 0),
            critic=planned.get("critic", 0),
        )
        return choose(self._memory, sizes, device=self.ledger.device.type, device_bytes=device_bytes)

    def _weights(self, sync: Sync | Weights, leaving: list[Tensor]) -> Weights:
        if not callable(sync):
            return sync
        if not leaving:
            return KeptWeights(sync)
        parcel = self._parcel("parameters", self._memory.arena, join=False)
        return OffloadedWeights(sync, parcel, leaving)

    def _parcel(self, owner: str, place: str, *, join: bool) -> Parcel:
        section = self.arenas.section(place, owner, self._sizes[owner])
        return Parcel(owner, section, self._lane, join=join, verify=self._memory.verify)


def make_room(memory: MemoryConfig, policy: Trained) -> None:
    """Frees the gradients, which the first update takes again, so that the engine is made in their place."""
    if memory.gradients == "release":
        Gradients(policy.chunks, policy.megatron_optimizer).release()


def held_in_rollout(memory: MemoryConfig, policy: Trained) -> int:
    """Bytes of the policy that certainly stay on the device in a rollout, beside the engine's own weights."""
    kept = sum(tensor.nbytes for tensor in policy.tensors().values()) if memory.parameters == "keep" else 0
    if memory.optimizer != "none":
        return kept
    state = OptimizerState(policy.megatron_optimizer, lambda: policy.tensors().values())
    return kept + state.planned_bytes(policy.moments)


def _held(tensors: Iterable[Tensor], own: Region | None, other: Region | None) -> list[Tensor] | int:
    """What an owner holds: its tensors, or the pages of its region and what lies outside of both regions."""
    if own is None:
        return list(tensors)
    outside = [t.untyped_storage() for t in tensors if not _lies_in(own, t) and not (other and _lies_in(other, t))]
    return own.committed_bytes + sum({storage.data_ptr(): storage.nbytes() for storage in outside}.values())


def _lies_in(region: Region, tensor: Tensor) -> bool:
    return region.address <= tensor.data_ptr() < region.address + region.nbytes
