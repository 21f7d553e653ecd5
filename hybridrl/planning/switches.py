"""The two switches between training and rollout: bytes by link and seconds, from the reshard's own plan."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hybridrl.config.schema import Config
from hybridrl.planning.hardware import Hardware
from hybridrl.planning.layouts import Layouts
from hybridrl.reshard.cost import plan_seconds
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.sglang import SGLangLayout
from hybridrl.reshard.local import find_aliases
from hybridrl.reshard.placement import place
from hybridrl.reshard.planner import Planner

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


class Reshard:
    """How the weights get from the trainer to the engine, and back. Raises ValueError for layouts that make no plan."""

    def __init__(self, config: Config, layouts: Layouts, hardware: Hardware) -> None:
        self.config, self.layouts, self.hardware = config, layouts, hardware

    @cached_property
    def planner(self) -> Planner:
        """Of all ranks; made when traffic or staging is asked for."""
        return Planner(
            self.layouts.training,
            self.destination,
            bucket_bytes=self.config.reshard.bucket_bytes,
            ranks_per_node=self.config.trainer.ranks_per_node,
        )

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
        if not self.shares:
            return 0
        sides = [(layout.params(rank), layout.pieces(rank)) for layout in (self.layouts.training, self.destination)]
        return sum(alias.nbytes for alias in find_aliases(*sides, zero_padding=True))

    def engine_bytes(self, rank: int) -> int:
        """Bytes of all the rank's engine weights."""
        return sum(param.nbytes for param in self.destination.params(rank).values())

    def staging_bytes(self, rank: int) -> int:
        """Bytes of the rank's staging buffers."""
        peaks = (self.planner.direct.peak(rank), self.planner.relayed.peak(rank))
        return min(2 * self.config.reshard.bucket_bytes, 2 * max(peaks))

    @property
    def traffic(self) -> Bytes:
        """Bytes from each rank (row) to each (column), relays included."""
        moved: Bytes = self.planner.routes.direct + self.planner.routes.relayed
        return moved

    def switch(self, *, reshards: bool, host_bytes: int) -> Switch:
        """One direction that reshards or not, and moves so many bytes of each rank between device and host.

        The way back has the same bytes as the way there, with senders and receivers exchanged.
        """
        host = host_bytes / self.hardware.host_gb_per_s / 1e9
        if not reshards:
            return Switch(
                node_bytes=0,
                network_bytes=0,
                host_bytes=host_bytes,
                device_bytes=0,
                reshard_seconds=0.0,
                host_seconds=host,
            )
        near = self._near
        moved = self.traffic
        node, network = (np.where(mask, moved, 0) for mask in (near, ~near))
        return Switch(
            node_bytes=_busiest(node),
            network_bytes=_busiest(network),
            host_bytes=host_bytes,
            device_bytes=int(self._copied.max()),
            reshard_seconds=self._seconds,
            host_seconds=host,
        )

    @cached_property
    def _near(self) -> npt.NDArray[np.bool_]:
        nodes = np.arange(self.planner.world) // self.hardware.link.ranks_per_node
        near: npt.NDArray[np.bool_] = nodes[:, None] == nodes
        return near

    @cached_property
    def _copied(self) -> Bytes:
        """Bytes that stay on each rank and are copied, those of the stage's first rank for all of a stage."""
        copied: Bytes = self.planner.routes.copied.astype(np.int64)
        stage = self.layouts.sizes.stage
        for rank in self.layouts.stage_ranks():
            copied[rank : rank + stage] -= self.aliased_bytes(rank)
        return np.maximum(copied, 0)

    @cached_property
    def _seconds(self) -> float:
        routes, planner = self.planner.routes, self.planner
        rounds = planner.direct.count + planner.relayed.count
        return plan_seconds(self.hardware.link, routes.direct, routes.relayed, self._copied, rounds)


def _busiest(traffic: Bytes) -> int:
    """Of the rank that sends or receives most."""
    return int(max(traffic.sum(0).max(), traffic.sum(1).max()))
