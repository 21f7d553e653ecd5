"""Optimizer state off the device and back: the arena against a plain copy of the same bytes, and Megatron's own way.

    python benchmarks/offload.py --json FILE

Three methods move the same bytes in the same run, interleaved, and a time is a median over `--repeats` after a warm-up:

- `arena`: hybridrl's parcel, out to the arena with its storages freed, and back;
- `copy`: one copy between two blocks that were touched before, the host's page-locked on a GPU: what the link gives;
- `megatron`: Megatron's `offload_to_cpu` and `restore_from_cpu`; on a CPU, where those do nothing, the same walk by
  hand: for each tensor a fresh one, one blocking copy, the old storage dropped.

`hidden_seconds` are those of the copies that pass while the device computes something else, in a run of their own.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridrl.memory.arena import Arena
from hybridrl.memory.lane import make_lane
from hybridrl.memory.parcel import Parcel, planned_bytes
from hybridrl.memory.residence import OptimizerState

MIB = 2**20
SHARES = (1, 2, 4, 8, 16, 32, 1)
"""Sizes of the parameters, in turn, in MiB: norms and biases up to stacks of experts."""
TARGETS = {"cpu": {"copy": 0.8, "megatron": 1.0, "hidden": 0.0}, "cuda": {"copy": 0.85, "megatron": 2.0, "hidden": 0.8}}
"""By device: GB/s as a fraction of the plain copy's and of Megatron's, and hidden seconds of all, at the least."""

Result = dict[str, Any]


class State:
    """An AdamW whose master weights and moments have about so many bytes in all."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        masters: list[torch.nn.Parameter] = []
        while 3 * sum(p.nbytes for p in masters) < nbytes:
            size = SHARES[len(masters) % len(SHARES)] * MIB // 4
            masters.append(torch.nn.Parameter(torch.randn(size, device=device)))
        self.optimizer = torch.optim.AdamW(masters)
        for p in masters:
            moments = {"exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p), "step": torch.tensor(1.0)}
            self.optimizer.state[p] = moments
        self.nbytes = 3 * sum(p.nbytes for p in masters)
        self.groups = OptimizerState(SimpleNamespace(optimizer=self.optimizer), list).groups


class ArenaMethod:
    """A parcel."""

    name = "arena"

    def __init__(self, state: State) -> None:
        self._groups = state.groups
        needed = planned_bytes([[t.nbytes for t in group] for group in state.groups()])
        self._arena = Arena(needed, pin=state.device.type == "cuda")
        self.parcel = Parcel("optimizer", self._arena.section("optimizer", needed), make_lane(state.device), join=True)

    def out(self) -> None:
        self.parcel.leave(self._groups())
        self.parcel.left()

    def back(self) -> None:
        self.parcel.come_back()
        self.parcel.wait()

    def hidden(self, work: Callable[[], None]) -> dict[str, float]:
        """Seconds of the copies that passed beside `work`, by direction."""
        self.parcel.out.take(), self.parcel.back.take()
        self.parcel.leave(self._groups())
        work()
        self.parcel.left()
        self.parcel.come_back()
        work()
        self.parcel.wait()
        return {"out": self.parcel.out.take()["hidden_seconds"], "in": self.parcel.back.take()["hidden_seconds"]}


class CopyMethod:
    """One copy between touched blocks."""

    name = "copy"

    def __init__(self, state: State) -> None:
        self._device = torch.ones(state.nbytes, dtype=torch.uint8, device=state.device)
        self._host = torch.ones(state.nbytes, dtype=torch.uint8, pin_memory=state.device.type == "cuda")

    def out(self) -> None:
        self._host.copy_(self._device, non_blocking=True)

    def back(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class MegatronMethod:
    """Megatron's calls; on a CPU the same walk by hand."""

    name = "megatron"

    def __init__(self, state: State) -> None:
        self._optimizer = state.optimizer
        self._cuda = state.device.type == "cuda"

    def out(self) -> None:
        if self._cuda:
            self._megatron().offload_to_cpu(SimpleNamespace(optimizer=self._optimizer))
        else:
            self._walk()

    def back(self) -> None:
        if self._cuda:
            self._megatron().restore_from_cpu(SimpleNamespace(optimizer=self._optimizer))
        else:
            self._walk()

    def _megatron(self) -> Any:
        from hybridrl.parallel import compat as compat  # isort: skip - must precede megatron.core

        from megatron.core.optimizer.optimizer import MegatronOptimizer

        return MegatronOptimizer

    def _walk(self) -> None:
        for p in self._optimizer.param_groups[0]["params"]:
            p.data = _fresh(p.data)
        for state in self._optimizer.state.values():
            for kind, value in state.items():
                if value.dim():
                    state[kind] = _fresh(value)


def measure(nbytes: int, repeats: int, device: torch.device) -> list[Result]:
    """One result a method and direction."""
    state = State(nbytes, device)
    arena = ArenaMethod(state)
    methods: list[Any] = [arena, CopyMethod(state), MegatronMethod(State(nbytes, device))]
    before = [t.clone() for group in state.groups() for t in group]
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeats + 1):
        for method in methods:
            for direction, move in (("out", method.out), ("in", method.back)):
                seconds = timed(move, device)
                if turn:
                    times.setdefault((method.name, direction), []).append(seconds)
        gc.collect()
    hidden = arena.hidden(work_of(statistics.median(times["arena", "in"]), device))
    assert all(a.equal(b) for a, b in zip(before, (t for group in state.groups() for t in group), strict=True))
    return [
        {
            "direction": direction,
            "method": name,
            "gb_per_s": state.nbytes / statistics.median(found) / 1e9,
            "seconds": statistics.median(found),
            "hidden_seconds": hidden[direction] if name == "arena" else 0.0,
            "bytes": state.nbytes,
            "device": device.type,
        }
        for (name, direction), found in times.items()
    ]


def timed(move: Callable[[], None], device: torch.device) -> float:
    """Seconds until it has really happened."""
    _synchronize(device)
    start = time.perf_counter()
    move()
    _synchronize(device)
    return time.perf_counter() - start


def work_of(seconds: float, device: torch.device) -> Callable[[], None]:
    """Products of matrices that take about twice so long, on the device and on one core."""
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.randn(size, size, device=device)

    def work(count: int = 4) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    work()
    once = timed(work, device) / 4
    return partial(work, max(1, round(2 * seconds / once)))


def judge(results: list[Result]) -> list[str]:
    """What misses its target, a line each."""
    by = {(r["method"], r["direction"]): r for r in results}
    targets = TARGETS[results[0]["device"]]
    problems = []
    for direction in ("out", "in"):
        ours = by["arena", direction]
        for other in ("copy", "megatron"):
            ratio = ours["gb_per_s"] / by[other, direction]["gb_per_s"]
            if ratio < targets[other]:
                problems.append(f"{direction}: {ratio:.2f} of {other}, expected {targets[other]} at least")
        share = ours["hidden_seconds"] / ours["seconds"]
        if share < targets["hidden"]:
            problems.append(f"{direction}: {share:.2f} of the time is hidden, expected {targets['hidden']} at least")
    return problems


def render(results: list[Result]) -> str:
    """A table."""
    lines = [f"{'method':10} {'direction':>9} {'GB/s':>8} {'seconds':>9} {'hidden':>8}"]
    lines += [
        f"{r['method']:10} {r['direction']:>9} {r['gb_per_s']:8.2f} {r['seconds']:9.4f} {r['hidden_seconds']:8.4f}"
        for r in results
    ]
    return "\n".join(lines)


def _fresh(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def main() -> None:
    """Measures, prints the table and what misses its target, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--mib", type=int, help="MiB of state (512, on a GPU 16,384)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = measure((options.mib or (16384 if device.type == "cuda" else 512)) * MIB, options.repeats, device)
    print(render(results))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))
    problems = judge(results)
    for problem in problems:
        print(f"missed: {problem}")
    if problems and options.check:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
