"""The two switches between training and rollout: bytes by link and seconds, from the reshard's own plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hybridrl.config.schema import Config
from hybridrl.planning.hardware import Hardware
from hybridrl.planning.layouts import Layouts
from hybridrl.reshard.cost import Interconnect, plan_seconds
from hybridrl.reshard.invert import invert_planner
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.sglang import SGLangLayout
from hybridrl.reshard.local import find_aliases
from hybridrl.reshard.placement import place
from hybridrl.reshard.plan import Alias
from hybridrl.reshard.planner import PAGED_PARTS, Planner, staged_planner

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One direction, of the rank that moves most over each link. Seconds are at nominal bandwidths."""

    node_bytes: int
    """Between ranks of a node."""
    network_bytes: int
    """Between nodes."""
    host_bytes: int
    """Between a device and its host."""
    device_bytes: int
    """Copied within a device."""
    reshard_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        """Without any overlap of the two."""
        return self.reshard_seconds + self.host_seconds


class Way:
    """One direction of the weights: what each rank moves and stages."""

    def __init__(self, planner: Planner, slots: int, link: Interconnect, kept: Callable[[int], int]) -> None:
        self.planner, self.slots, self.link = planner, slots, link
        self._kept = kept

    def staging_bytes(self, rank: int, *, receives: bool) -> int:
        """Bytes of the rank's buffers; without those to receive into where ranks read each other's memory."""
        schedules = (self.planner.direct, self.planner.relayed)
        staged = [schedule.staged(rank) for schedule in schedules]
        most = [max(int(part[side].max(initial=0)) for part in staged) for side in (0, 1)]
        rounds = sum(schedule.count for schedule in schedules)
        return min(self.slots, max(1, rounds)) * (most[0] + most[1] * receives)

    @property
    def traffic(self) -> Bytes:
        """Bytes from each rank (row) to each (column), relays included."""
        moved: Bytes = self.planner.routes.direct + self.planner.routes.relayed
        return moved

    @cached_property
    def copied(self) -> Bytes:
        """Bytes that stay on each rank and are copied, those that are shared apart."""
        shared = np.array([self._kept(rank) for rank in range(self.planner.world)])
        copied: Bytes = np.maximum(self.planner.routes.copied.astype(np.int64) - shared, 0)
        return copied

    @cached_property
    def seconds(self) -> float:
        """By the busiest links, at nominal bandwidths."""
        routes, planner = self.planner.routes, self.planner
        rounds = planner.direct.count + planner.relayed.count
        return plan_seconds(self.link, routes.direct, routes.relayed, self.copied, rounds)

    def switch(self, host_bytes: int, host_seconds: float) -> Switch:
        """This way, beside so many bytes of each rank between device and host."""
        nodes = np.arange(self.planner.world) // self.link.ranks_per_node
        near = nodes[:, None] == nodes
        node, network = (np.where(mask, self.traffic, 0) for mask in (near, ~near))
        return Switch(
            node_bytes=_busiest(node),
            network_bytes=_busiest(network),
            host_bytes=host_bytes,
            device_bytes=int(self.copied.max()),
            reshard_seconds=self.seconds,
            host_seconds=host_seconds,
        )


class Reshard:
    """How the weights get from the trainer to the engine, and back. Raises ValueError for layouts that make no plan."""

    def __init__(self, config: Config, layouts: Layouts, hardware: Hardware) -> None:
        self.config, self.layouts, self.hardware = config, layouts, hardware
        self._aliases_by_rank: dict[int, tuple[Alias, ...]] = {}

    @cached_property
    def there(self) -> Way:
        """To the engine; made when traffic or staging is asked for."""
        bucket = self.config.reshard.bucket_bytes
        planner, slots = staged_planner(
            self.layouts.training,
            self.destination,
            max(1, bucket // PAGED_PARTS) if self.returns else bucket,
            self.config.trainer.ranks_per_node,
        )
        return Way(planner, slots, self.hardware.link, self._shared)

    @cached_property
    def back(self) -> Way:
        """To the trainer, where the weights must come back."""
        return Way(invert_planner(self.there.planner), self.there.slots, self.hardware.link, self._shared)

    @property
    def returns(self) -> bool:
        """Whether there is one copy of the weights, which comes back from the engine."""
        return self.config.memory.parameters == "single"

    @cached_property
    def destination(self) -> Layout:
        """The engine's layout with its ranks placed as the configuration says."""
        rollout = self.layouts.rollout
        if self.config.reshard.placement != "auto" or not isinstance(rollout, SGLangLayout):
            return rollout
        chosen = place(self.layouts.training, rollout, self.config.trainer.ranks_per_node)
        return rollout.with_ranks(chosen.ranks)

    @property
    def shares(self) -> bool:
        """Whether the engine may use the trainer's storage: it is in the same process."""
        rollout = self.config.rollout
        return rollout.engine == "transformers" or rollout.sglang.hosting == "in_process"

    def aliased_bytes(self, rank: int) -> int:
        """Bytes of the rank's engine weights that are the trainer's storage."""
        return sum(alias.nbytes for alias in self._aliases(rank))

    def shared_params(self, rank: int) -> set[str]:
        """The trainer's parameters on the rank that the engine uses too."""
        return {alias.source for alias in self._aliases(rank)}

    def _aliases(self, rank: int) -> tuple[Alias, ...]:
        if not self.shares:
            return ()
        if rank not in self._aliases_by_rank:
            sides = [(layout.params(rank), layout.pieces(rank)) for layout in (self.layouts.training, self.destination)]
            self._aliases_by_rank[rank] = find_aliases(*sides, zero_padding=True)
        return self._aliases_by_rank[rank]

    def engine_bytes(self, rank: int) -> int:
        """Bytes of all the rank's engine weights."""
        return sum(param.nbytes for param in self.destination.params(rank).values())

    def staging_bytes(self, rank: int) -> int:
        """Bytes of the rank's staging buffers, of both ways. Ranks on CPUs read each other's."""
        ways = (self.there, self.back) if self.returns else (self.there,)
        return sum(way.staging_bytes(rank, receives=self.layouts.transformer_engine) for way in ways)

    def switches(self, host_bytes: int) -> dict[str, Switch]:
        """Both directions, each of which moves so many bytes of a rank between device and host."""
        host = host_bytes / self.hardware.host_gb_per_s / 1e9
        stays = Switch(
            node_bytes=0,
            network_bytes=0,
            host_bytes=host_bytes,
            device_bytes=0,
            reshard_seconds=0.0,
            host_seconds=host,
        )
        return {
            "to_rollout": self.there.switch(host_bytes, host),
            "to_training": self.back.switch(host_bytes, host) if self.returns else stays,
        }

    def _shared(self, rank: int) -> int:
        """Aliased bytes of a rank, those of its stage's first rank for all of a stage."""
        stage = self.layouts.sizes.stage
        return self.aliased_bytes(rank // stage * stage)


def _busiest(traffic: Bytes) -> int:
    """Of the rank that sends or receives most."""
    return int(max(traffic.sum(0).max(), traffic.sum(1).max()))
