"""The compiled programs of all ranks of a world in one process: tensors of any strides, in the executor's order."""

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch

from hybridrl.reshard.buffers import make_staging
from hybridrl.reshard.compile import CompiledRound, Compiler, Program, torch_dtype, view_problems
from hybridrl.reshard.golden import box_slices
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.storages import Tensors, overlap_problems

Ranks = Mapping[int, Tensors]
CPU = torch.device("cpu")


class Programs:
    """Every rank's program over its tensors; `run` moves the weights.

    With `overlaps` a round is packed while the one before is in flight, whose bytes move as late as they may. `paging`
    is, by rank, what an executor takes under that name.
    """

    def __init__(
        self,
        planner: Planner,
        sources: Ranks,
        destinations: Ranks,
        *,
        slots: int = 1,
        overlaps: bool = False,
        paging: Mapping[int, Callable[[Program], Program]] | None = None,
    ) -> None:
        self._overlaps = overlaps and slots > 1
        self._programs: list[Program] = []
        for rank in range(planner.world):
            plan, ours, theirs = planner.plan(rank), sources.get(rank, {}), destinations.get(rank, {})
            assert view_problems(plan, ours, theirs) == []
            assert overlap_problems(ours, theirs, {(a.source, a.destination) for a in plan.aliases}) == []
            staging = make_staging(plan, CPU, slots)
            compiler = Compiler(plan, ours, theirs, staging, planner.world, gather=paging is None)
            program = compiler.compile()
            self._programs.append(program if paging is None else paging[rank](program))

    def run(self) -> None:
        """What the executors of all ranks do in a sync."""
        for program in self._programs:
            for part in program.copies:
                part.run()
            for fill in program.fills:
                fill.zero_()
        rounds = list(zip(*(program.rounds for program in self._programs), strict=True))
        for one in rounds[:1]:
            _pack(one)
        for k, one in enumerate(rounds):
            following = rounds[k + 1 : k + 2]
            early = self._overlaps and all(other[0].relay == one[0].relay for other in following)
            for other in following if early else ():
                _pack(other)
            _move(one)
            for each in one:
                for part in each.unpack:
                    part.run()
            for other in () if early else following:
                _pack(other)
        for program in self._programs:
            for part in program.echoes:
                part.run()


def _pack(one: tuple[CompiledRound, ...]) -> None:
    for each in one:
        for part in each.pack:
            part.run()


def _move(one: tuple[CompiledRound, ...]) -> None:
    """What a transport does: every rank's bytes to every other."""
    for rank, receiver in enumerate(one):
        ends = list(accumulate(receiver.exchange.receive_splits, initial=0))
        for peer, sender in enumerate(one):
            start = sum(sender.exchange.send_splits[:rank])
            sent = sender.exchange.send[start : start + sender.exchange.send_splits[rank]]
            receiver.exchange.receive[ends[peer] : ends[peer + 1]].copy_(sent)


def write(layout: Layout, rank: int, whole: Tensors, params: Tensors) -> None:
    """Writes whole tensors into a rank's parameters, converted once, with padding of 0."""
    for param in params.values():
        param.zero_()
    for piece in layout.pieces(rank) if rank in layout.ranks else ():
        target = params[piece.param][piece.slices]
        target.copy_(whole[piece.tensor][box_slices(piece.box)].view(target.shape))


def like(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Plain tensors for a rank's parameters, full of NaN."""
    params = layout.params(rank) if rank in layout.ranks else {}
    return {n: torch.full(p.shape, float("nan"), dtype=torch_dtype(p.dtype)) for n, p in params.items()}


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Whether two shards are equal in every bit, however they lie."""
    return ours.keys() == theirs.keys() and all(torch.equal(_bits(ours[n]), _bits(theirs[n])) for n in ours)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone().view(torch.uint8)
