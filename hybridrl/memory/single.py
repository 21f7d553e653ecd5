"""One copy of the weights: they are in the trainer's layout or in the engine's, and never there twice.

    weights = SingleWeights(actor.layout, actor.tensors(), region, engine.layout, engine.parameters(), rank,
                            adopt=engine.adopt)
    weights.to_rollout(version)     # the engine's parameters hold the weights, the trainer's hold nothing
    weights.to_training()           # and back, bit for bit

What is the same bytes on both sides is shared for good and stays where it is. Of the rest, pages of one side are given
back as they drain and those of the other are taken as they fill: beside the larger of the two there are at most two
buckets on the device, staging included. No host copy is needed.

A reshard that fails half-way has lost the weights, since nobody holds them whole: the run must go on from a checkpoint.
"""

import time
from collections.abc import Callable, Mapping
from enum import Enum

import torch

from hybridrl.memory.region import Region, region_bytes
from hybridrl.reshard.agreement import SyncError
from hybridrl.reshard.aliasing import Adopt, is_shared, share
from hybridrl.reshard.executor import Executor, Hook
from hybridrl.reshard.golden_checks import agree, storage_problems
from hybridrl.reshard.invert import invert_planner
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.paging import Paging
from hybridrl.reshard.planner import DEFAULT_BUCKET_BYTES, PAGED_PARTS
from hybridrl.reshard.storages import Tensors
from hybridrl.reshard.sync import REFUSED, Planned, plan_sync, proven, sync_metrics, transport_of


class Where(Enum):
    """Which side holds the weights."""

    TRAINING = "training"
    ROLLOUT = "rollout"
    NOWHERE = "nowhere"


class WeightsStateError(RuntimeError):
    """The weights are not where they must be for this."""


class SingleWeights:
    """The way of the weights into the engine's layout and back, on this rank. Every rank of the world makes its own.

    Args:
        training, trained: the trainer's layout, and this rank's live tensors under its names. They hold the weights.
        region: where they lie; tensors elsewhere (small buffers) stay where they are.
        engine, served: the engine's; its parameters get other storage here, in a region or the trainer's own.
        rank: this rank of the world.
        adopt: gives parameters of the engine other storage, for good; see `SharingEngine.adopt`.
        bucket_bytes: at most twice this is on a rank beside the larger of the two sides.
        ranks_per_node, hooks, clock: see `WeightSync`.
        make_region: makes a region of so many bytes on a device.

    Raises WeightError on every rank as `WeightSync` does, and where the engine does not hold all that training needs.
    """

    def __init__(
        self,
        training: Layout,
        trained: Tensors,
        region: Region,
        engine: Layout,
        served: Tensors,
        rank: int,
        *,
        adopt: Adopt,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ranks_per_node: int | None = None,
        hooks: Mapping[str, Hook] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        make_region: Callable[[int, torch.device], Region] = Region,
    ) -> None:
        problems = [f"source {text}" for text in storage_problems(training, trained, rank)]
        problems += [f"destination {text}" for text in storage_problems(engine, served, rank)]
        agree(REFUSED, problems)
        part = max(1, bucket_bytes // PAGED_PARTS)
        there = plan_sync(training, engine, rank, part, ranks_per_node)
        back = proven(lambda: (invert_planner(there.plan.planner), there.slots), rank)
        agree(REFUSED, share(there.plan, trained, served, adopt))
        shared = {alias.destination for alias in there.plan.aliases}
        self.region, self.engine_layout = region, engine
        self.engine_region = _settle({n: t for n, t in served.items() if n not in shared}, adopt, make_region)
        """Where the engine's parameters lie that it does not share."""
        agree(REFUSED, _strays(served, shared, self.engine_region))
        self.aliased_bytes = sum(alias.nbytes for alias in there.plan.aliases)
        kept = [trained[alias.source] for alias in there.plan.aliases if is_shared(alias, trained, served)]
        self._paging = {
            Where.ROLLOUT: Paging(region, self.engine_region, kept=kept, chunk_bytes=part),
            Where.TRAINING: Paging(self.engine_region, region, chunk_bytes=part, by_source=True),
        }
        self._transport = transport_of(trained, served)

        def executor(planned: Planned, source: Tensors, destination: Tensors, to: Where) -> Executor:
            return Executor(
                planned.plan,
                source,
                destination,
                self._transport,
                slots=planned.slots,
                hooks=hooks,
                clock=clock,
                paging=self._paging[to],
            )

        self._executors = {
            Where.ROLLOUT: executor(there, trained, served, Where.ROLLOUT),
            Where.TRAINING: executor(back, served, trained, Where.TRAINING),
        }
        self.where = Where.TRAINING
        """Which side holds the weights."""
        self.way_back: dict[str, float] = {}
        """What `to_rollout` returns, of the last way back."""
        self._version = 0

    def to_rollout(self, version: int) -> dict[str, float]:
        """Brings the weights into the engine as `version`, and gives the trainer's copy back. Collective.

        Returns this rank's metrics as `WeightSync.run` does, and `sync/peak_bytes`, the most that both sides and
        staging had at a time.

        Raises WeightsStateError where the engine has them already, and SyncError as `Executor.run` does.
        """
        self._require(Where.TRAINING, f"weights {version} cannot go to the rollout")
        self._version = version
        return self._move(Where.ROLLOUT)

    def to_training(self) -> None:
        """Brings the weights back into the trainer's parameters, bit for bit, unless they are there. Collective.

        Raises WeightsStateError where they were lost, and SyncError as `Executor.run` does.
        """
        if self.where is not Where.TRAINING:
            self._require(Where.ROLLOUT, f"weights {self._version} cannot go back to training")
            self.way_back = self._move(Where.TRAINING)

    def wait(self) -> None:
        """Nothing: what `to_training` began has ended. Raises WeightsStateError where the trainer has no weights."""
        self._require(Where.TRAINING, "the trainer's parameters cannot be used")

    def staging(self) -> list[torch.Tensor]:
        """The buffers of both ways."""
        return [tensor for executor in self._executors.values() for tensor in executor.staging.tensors()]

    def close(self) -> None:
        """Ends the transport."""
        self._transport.close()

    def _require(self, where: Where, refused: str) -> None:
        if self.where is Where.NOWHERE:
            raise WeightsStateError(
                f"{refused}: they were lost when weights {self._version} were half-way between trainer and engine; "
                "start again from the last checkpoint"
            )
        if self.where is not where:
            raise WeightsStateError(f"{refused}: the weights are in {self.where.value}, not in {where.value}")

    def _move(self, to: Where) -> dict[str, float]:
        executor, paging = self._executors[to], self._paging[to]
        origin, self.where = self.where, Where.NOWHERE  # and so it stays if anything ends this half-way, Ctrl-C too
        try:
            executor.run(self._version)
        except SyncError as error:
            if not error.touched:
                self.where = origin
            raise
        paging.destination.commit(0, paging.destination.nbytes)  # alignment, which belongs to no parameter
        self.region.trim()
        self.where = to
        staging = sum(one.staging.nbytes for one in self._executors.values())
        return {**sync_metrics(executor, self.aliased_bytes), "sync/peak_bytes": float(paging.peak_bytes + staging)}


def _settle(tensors: Tensors, adopt: Adopt, make_region: Callable[[int, torch.device], Region]) -> Region:
    """A region that holds these parameters from now on; it has no pages yet."""
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    region = make_region(region_bytes(tensor.nbytes for tensor in tensors.values()), device)
    problem = ""
    try:
        adopt({name: region.take(tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    except ValueError as error:
        problem = str(error)
    agree(REFUSED, [problem] if problem else [])
    return region


def _strays(served: Tensors, shared: set[str], region: Region) -> list[str]:
    """Parameters that were to lie in the region and do not."""
    return [
        f"destination {name} was to lie in the engine's region, and does not: the tensor given for it is not the one "
        "that the engine reads"
        for name, tensor in served.items()
        if name not in shared and not region.address <= tensor.data_ptr() < region.address + region.nbytes
    ]
