"""Runs a plan: compiled once over live storage, each sync then only packs, exchanges and unpacks.

What a sync does to a rank, in this order: agree with all ranks that nothing stands against it; copy what is here
already, and zero padding; round after round pack, exchange, unpack, each with a fence; echo what is needed twice;
rebuild derived state; agree with all ranks that all of it worked. Only then is the new version in service.

With two slots of staging and a transport that moves bytes by itself, round k+1 is packed while round k is in flight,
and round k is unpacked while round k+1 is.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridrl.reshard.agreement import Agreement, Outcome, SyncError
from hybridrl.reshard.compile import CompiledRound, Compiler, Program, Runnable, view_problems
from hybridrl.reshard.golden_checks import agree
from hybridrl.reshard.plan import Derived, Plan
from hybridrl.reshard.storages import Storages, Tensors, device_of, device_problems, overlap_problems
from hybridrl.reshard.transports import Transport

Hook = Callable[[Sequence[Derived]], None]
"""Rebuilds derived state of the engine in place, from parameters that have just been written."""


@dataclass(slots=True)
class Seconds:
    """Where the time of the last sync went, by the executor's clock."""

    total: float = 0.0
    copy: float = 0.0
    """Local copies, padding and echoes."""
    rounds: float = 0.0
    """Pack, exchange and unpack."""


class Executor:
    """One rank's plan over its live tensors. All ranks make theirs together, and run them together.

    Args:
        plan: this rank's.
        source, destination: this rank's live tensors by the names of the two layouts; empty off their ranks. They may
            share bytes only where the plan says that one is an alias of the other.
        transport: between the ranks of the world.
        hooks: by name, what rebuilds the derived state that the plan lists.
        slots: staging buffers in each direction; 2 overlaps packing with the exchange, and takes twice the staging.
        clock: seconds, for `seconds`; on a GPU one that synchronises, if phases are to be told apart.
        paging: puts into the program what else is to run in it (see `hybridrl.reshard.paging`).

    Raises WeightError on every rank, before anything is sent or written, where a rank's tensors do not fit its plan.
    """

    def __init__(
        self,
        plan: Plan,
        source: Tensors,
        destination: Tensors,
        transport: Transport,
        *,
        hooks: Mapping[str, Hook] | None = None,
        slots: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        paging: Callable[[Program], Program] | None = None,
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.plan = plan
        self.seconds = Seconds()
        self.version: int | None = None
        """Version of the weights that the destination holds whole; None where it holds none, or a half-written one."""
        self._hooks = dict(hooks or {})
        agree("the reshard cannot be run", self._problems(source, destination, world))
        device = device_of(source, destination)
        self.staging = transport.stage(plan, device, slots)
        compiler = Compiler(plan, source, destination, self.staging, world, gather=paging is None)
        program = compiler.compile()
        self._program = program if paging is None else paging(program)
        self._storages = {"source": Storages(source), "destination": Storages(destination)}
        self._transport = transport
        self._overlaps = transport.overlaps and len(self.staging.send) > 1
        self._agreement = Agreement(device, transport)
        self.clock = clock

    def run(self, version: int, check: Callable[[], None] | None = None) -> None:
        """Brings the source's weights into the destination, all of them, as `version`. Collective.

        `check` runs once all is written, on every rank, and raises where that is wrong.

        Raises SyncError on every rank: untouched, where a tensor has been given other storage or ranks were called for
        different versions; touched, with `version` None from then on, where anything failed on any rank after that. A
        later run writes everything anew.
        """
        start = self.clock()
        problems = [f"{side} {text}" for side, one in self._storages.items() for text in one.problems()]
        told = self._agreement.settle(version, "; ".join(problems))
        if told:
            raise SyncError(f"weights {version} were not synchronised", told, touched=False)
        self.version = None
        work, wire = Outcome(), Outcome()
        with torch.inference_mode():
            self._write(work, wire)
        if check is not None and not wire.failed:
            with work:
                check()
        self._finish(version, wire if wire.failed else work)
        self.seconds.total = self.clock() - start

    def close(self) -> None:
        """Ends the transport."""
        self._transport.close()

    def _write(self, work: Outcome, wire: Outcome) -> None:
        began = self.clock()
        with work:
            _run(self._program.copies)
            if self._program.fills:
                torch._foreach_zero_(self._program.fills)
        copied = self.clock()
        self._exchange(work, wire)
        exchanged = self.clock()
        if not work.failed and not wire.failed:
            with work:
                _run(self._program.echoes)
        self.seconds.copy = copied - began + self.clock() - exchanged
        self.seconds.rounds = exchanged - copied
        if not work.failed and not wire.failed:
            with work:
                self._rebuild()

    def _exchange(self, work: Outcome, wire: Outcome) -> None:
        """All rounds.

        After an error of its own (`work`) the rank packs and unpacks no more but joins every exchange: the others wait
        for it. After an error of the transport (`wire`) there is nothing left to join: theirs fail as well.
        """
        rounds = self._program.rounds
        self._begin(rounds[:1], work, wire)
        for k, one in enumerate(rounds):
            following = rounds[k + 1 : k + 2]
            # The first relay passes on what the round before it has yet to unpack.
            early = self._overlaps and all(other.relay == one.relay for other in following)
            if early:
                self._pack(following, work)
            if not wire.failed:
                with wire:
                    self._transport.finish()
            if early:
                self._start(following, wire)
            if not work.failed and not wire.failed:
                with work:
                    _run(one.unpack)
            if not early:
                self._begin(following, work, wire)

    def _begin(self, following: Sequence[CompiledRound], work: Outcome, wire: Outcome) -> None:
        self._pack(following, work)
        self._start(following, wire)

    def _pack(self, following: Sequence[CompiledRound], work: Outcome) -> None:
        """Packs the one round there is, or none."""
        for one in () if work.failed else following:
            with work:
                _run(one.pack)

    def _start(self, following: Sequence[CompiledRound], wire: Outcome) -> None:
        for one in () if wire.failed else following:
            with wire:
                self._transport.start(one.exchange)

    def _rebuild(self) -> None:
        for name in dict.fromkeys(derived.hook for derived in self.plan.derived):
            self._hooks[name]([derived for derived in self.plan.derived if derived.hook == name])

    def _finish(self, version: int, outcome: Outcome) -> None:
        what = f"weights {version} are half-written and not in service"
        try:
            told = self._agreement.settle(version, outcome.text)
        except RuntimeError as error:
            told = [text for text in (outcome.text, f"the ranks could not agree on the outcome: {error}") if text]
        if told:
            raise SyncError(what, told, touched=True) from outcome.error
        self.version = version

    def _problems(self, source: Tensors, destination: Tensors, world: int) -> list[str]:
        plan = self.plan
        aliases = {(alias.source, alias.destination) for alias in plan.aliases}
        found = view_problems(plan, source, destination)
        found += device_problems(source, destination)
        found += overlap_problems(source, destination, aliases)
        if plan.planner.world > world and plan.rounds:
            found.append(f"the plan is for {plan.planner.world} ranks, {world} are here")
        unknown = {derived.hook: derived.name for derived in plan.derived if derived.hook not in self._hooks}
        return found + [
            f"{name} must be rebuilt by the hook {hook}, which is missing" for hook, name in unknown.items()
        ]


def _run(parts: Iterable[Runnable]) -> None:
    for part in parts:
        part.run()
