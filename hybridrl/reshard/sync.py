"""Weight sync: from two layouts and the live tensors on both sides to a reshard that is planned, proven and run.

    sync = WeightSync(trainer.layout, trainer.tensors(), engine.layout, engine.parameters(), rank)
    metrics = sync.run(version)     # raises, or the engine's parameters are the trainer's, on all ranks

The golden path (`reshard.golden`) does the same slowly; tests hold the two to the same bits.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from hybridrl.models.weights import Param
from hybridrl.reshard.aliasing import Adopt, is_shared, share
from hybridrl.reshard.checksum import Checker
from hybridrl.reshard.executor import Executor, Hook
from hybridrl.reshard.golden_checks import agree, storage_problems
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import DEFAULT_BUCKET_BYTES, Planner, staged_planner
from hybridrl.reshard.proof import coverage_problems, peer_problems
from hybridrl.reshard.schedule import BucketError
from hybridrl.reshard.storages import Tensors, device_of
from hybridrl.reshard.survey import PlanError
from hybridrl.reshard.transports import Transport, make_transport

REFUSED = "weights cannot be synchronised"


class WeightSync:
    """The way of all weights from one layout to another, on this rank. Every rank of the world makes and runs its own.

    Made once, run each step: plan, proof and views are computed here and only used after. Tensors stay the caller's;
    they must be written in place, never given other storage.

    Args:
        source, source_tensors: the trainer's layout, and this rank's live tensors under its names.
        destination, destination_tensors: the engine's. The two sides may share storage where they are the same bytes.
        rank: this rank of the world.
        bucket_bytes: staging is at most twice this on any rank.
        ranks_per_node: ranks that share a node, and prefer each other as sources; None where all are equally near.
        verify: compare checksums after each sync (reads all weights once more).
        adopt: gives parameters of the destination the source's storage where the two are the same bytes, once, now:
            what the source's owner writes there is then in the destination at once, and needs no sync. None shares
            nothing.
        hooks: by name, what rebuilds derived state of the engine after each sync.
        transport: between the ranks; None takes what suits the tensors' device and the machine (`make_transport`).
        clock: see `Executor`.

    A rank that does not come to an exchange is given up after the process group's own timeout.

    Raises WeightError on every rank, before anything is sent or written, where tensors do not fit their layouts, no
    correct plan exists, or the ranks' plans differ.
    """

    def __init__(
        self,
        source: Layout,
        source_tensors: Tensors,
        destination: Layout,
        destination_tensors: Tensors,
        rank: int,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ranks_per_node: int | None = None,
        verify: bool = False,
        adopt: Adopt | None = None,
        hooks: Mapping[str, Hook] | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        problems = [f"source {text}" for text in storage_problems(source, source_tensors, rank)]
        problems += [f"destination {text}" for text in storage_problems(destination, destination_tensors, rank)]
        agree(REFUSED, problems)
        planned = plan_sync(source, destination, rank, bucket_bytes, ranks_per_node)
        self.plan = planned.plan
        if adopt is not None:
            agree(REFUSED, share(self.plan, source_tensors, destination_tensors, adopt))
        aliases = self.plan.aliases
        self.aliased_bytes = sum(a.nbytes for a in aliases if is_shared(a, source_tensors, destination_tensors))
        """Bytes of this rank's destination that are the source's storage."""
        self.executor = Executor(
            self.plan,
            source_tensors,
            destination_tensors,
            transport or transport_of(source_tensors, destination_tensors),
            hooks=hooks,
            slots=planned.slots,
            clock=clock,
        )
        self._check = Checker(self.plan, source_tensors, destination_tensors) if verify else None

    @property
    def version(self) -> int | None:
        """Version that the destination holds whole; None before the first sync and after one that failed half-way."""
        return self.executor.version

    def run(self, version: int) -> dict[str, float]:
        """Brings the source's weights into the destination as `version`; see `Executor.run`. Collective.

        Returns this rank's metrics: `sync/received_bytes`, `sync/sent_bytes`, `sync/copied_bytes`,
        `sync/aliased_bytes`, `sync/staging_bytes`, and seconds in all (`sync/seconds`), of local copies
        (`sync/copy_seconds`) and of rounds (`sync/rounds_seconds`).
        """
        self.executor.run(version, self._check)
        return sync_metrics(self.executor, self.aliased_bytes)

    def close(self) -> None:
        """Ends the transport."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Planned(NamedTuple):
    """A rank's plan, which all ranks have found to be right, and how many rounds of it are staged at a time."""

    plan: Plan
    slots: int


def plan_sync(source: Layout, destination: Layout, rank: int, bucket_bytes: int, ranks_per_node: int | None) -> Planned:
    """The rank's plan. Raises WeightError on every rank where there is none, or ranks disagree. Collective."""
    return proven(lambda: staged_planner(source, destination, bucket_bytes, ranks_per_node), rank)


def proven(make: Callable[[], tuple[Planner, int]], rank: int) -> Planned:
    """The rank's plan by the planner that `make` gives, with its slots; see `plan_sync`."""
    found: Planned | None = None
    problems: list[str] = []
    try:
        planner, slots = make()
        found = Planned(planner.plan(rank), slots)
    except PlanError as error:
        problems += error.problems
    except BucketError as error:
        problems.append(str(error))
    agree(REFUSED, problems)
    assert found is not None
    agree(REFUSED, coverage_problems(found.plan, _params(found.plan.planner.destination, rank)))
    agree(REFUSED, peer_problems(found.plan))
    return found


def sync_metrics(executor: Executor, aliased_bytes: int) -> dict[str, float]:
    """What `WeightSync.run` returns, of an executor that has run; `aliased_bytes` are those that are shared."""
    plan, seconds = executor.plan, executor.seconds
    return {
        "sync/seconds": seconds.total,
        "sync/copy_seconds": seconds.copy,
        "sync/rounds_seconds": seconds.rounds,
        "sync/received_bytes": float(plan.received_bytes),
        "sync/sent_bytes": float(plan.sent_bytes),
        "sync/copied_bytes": float(plan.copied_bytes + plan.aliased_bytes - aliased_bytes),
        "sync/aliased_bytes": float(aliased_bytes),
        "sync/staging_bytes": float(executor.staging.nbytes),
    }


def _params(layout: Layout, rank: int) -> Mapping[str, Param]:
    return layout.params(rank) if rank in layout.ranks else {}


def transport_of(source: Tensors, destination: Tensors) -> Transport:
    """The transport for where these tensors are."""
    return make_transport(device_of(source, destination))
