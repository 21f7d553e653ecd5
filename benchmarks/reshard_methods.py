"""What `benchmarks/reshard.py` compares with gathering (`benchmarks/reshard_gather.py`): the plan and the golden path.

Each method is made once over the live tensors, as it would be in a training run, and then run several times.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.aliasing import adopt_data
from hybridrl.reshard.bounds import lower_bound
from hybridrl.reshard.golden import golden_sync
from hybridrl.reshard.golden_checks import Sources
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.sync import WeightSync
from hybridrl.reshard.transports import GlooTransport

Tensors = Mapping[str, torch.Tensor]
Clock = Callable[[], float]


@dataclass(kw_only=True)
class Sides:
    """One case on this rank: both layouts, live tensors of both, and the limits."""

    source: Layout
    destination: Layout
    trained: Tensors
    served: Tensors
    rank: int
    device: torch.device
    bucket_bytes: int
    clock: Clock
    transport: str | None
    """Name of the plan's; None for what suits the machine."""
    share: bool
    """Whether the plan's destination shares storage with the source where the two are the same bytes."""


class Method(Protocol):
    """A way to bring all weights across."""

    received_bytes: int
    """That arrive at this rank in a run."""
    staging_bytes: int | None
    """Of buffers that it keeps for that; None where it keeps none."""
    sides: Sides

    def run(self) -> dict[str, float]:
        """One sync; seconds in parts, `total` among them."""


class PlanMethod:
    """This product."""

    def __init__(self, sides: Sides) -> None:
        # tensors of its own: the other methods must not write into what is shared
        self.sides = replace(sides, served={name: tensor.detach() for name, tensor in sides.served.items()})
        self.sync = WeightSync(
            sides.source,
            sides.trained,
            sides.destination,
            self.sides.served,
            sides.rank,
            bucket_bytes=sides.bucket_bytes,
            adopt=adopt_data(self.sides.served) if sides.share else None,
            transport=GlooTransport() if sides.transport == "gloo" else None,
        )
        self.received_bytes = self.sync.plan.received_bytes
        self.staging_bytes: int | None = self.sync.executor.staging.nbytes
        planner = self.sync.plan.planner
        bound = lower_bound([kind for kind, _ in planner.routes.kinds], planner.world)
        self.lower_bound_bytes = int(bound[sides.rank]) if sides.rank < planner.world else 0
        self.version = 0

    def run(self) -> dict[str, float]:
        """One sync as it is, for the total, and one whose ranks wait for each other between its parts, for these."""
        start = self.sides.clock()
        self._sync(time.perf_counter)
        total = self.sides.clock() - start
        parts = self._sync(self.sides.clock)
        return {"total": total, "copy": parts["sync/copy_seconds"], "rounds": parts["sync/rounds_seconds"]}

    def _sync(self, clock: Clock) -> dict[str, float]:
        self.version += 1
        self.sync.executor.clock = clock
        return self.sync.run(self.version)


class AllToAll:
    """One `all_to_all_single` with the plan's own split sizes, all rounds together, on packed buffers."""

    def __init__(self, plan: PlanMethod, sides: Sides) -> None:
        world = dist.get_world_size()
        self.sends, self.receives = [0] * world, [0] * world
        for one in plan.sync.plan.rounds:
            for message in one.sends:
                self.sends[message.peer] += message.nbytes
            for message in one.receives:
                self.receives[message.peer] += message.nbytes
        self.packed = torch.zeros(sum(self.sends), dtype=torch.uint8, device=sides.device)
        self.arrived = torch.zeros(sum(self.receives), dtype=torch.uint8, device=sides.device)
        self.clock = sides.clock

    def run(self) -> dict[str, float]:
        start = self.clock()
        dist.all_to_all_single(self.arrived, self.packed, self.receives, self.sends)
        return {"total": self.clock() - start}


class GoldenMethod:
    """The slow twin that the tests compare with."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        sources = Sources(sides.source)
        self.received_bytes = sum(
            piece.box.size * ITEM_BYTES[sources.dtype(piece, owner)]
            for tensor in sides.source.weights
            for piece, owner in sources.owned(tensor.name)
            if owner != sides.rank
        )
        self.staging_bytes: int | None = None

    def run(self) -> dict[str, float]:
        sides = self.sides
        start = sides.clock()
        golden_sync(
            sides.source,
            sides.trained,
            sides.destination,
            sides.served,
            sides.rank,
            convert=True,
            bucket_bytes=sides.bucket_bytes,
        )
        return {"total": sides.clock() - start}
