"""How long one rank takes to plan a reshard by itself, and in how much memory.

    python benchmarks/reshard_planner.py --json FILE

Each case runs in a fresh process. Seconds count everything that a rank does at its start: the weight map, both
layouts, the survey of all ranks and the rank's own plan (wall clock and processor time; the two differ on a busy
machine). The baseline is the same work without kinds: looking at every tensor by itself, as `--baseline` shows.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hybridrl.models.weights import Param, Piece, Tensor, WeightMap
from hybridrl.reshard.explain import ROLLOUT_KEYS, TRAIN_KEYS, find_model, parse_sizes, rollout_layout, train_layout
from hybridrl.reshard.layout import Holder, Layout
from hybridrl.reshard.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of layouts, and the rank that plans."""

    model: str
    world: int
    train: str
    rollout: str
    rank: int


CASES = (
    Case(model="qwen3_30b_a3b", world=8, train="tp=4,ep=8", rollout="tp=8,ep=8", rank=3),
    Case(model="qwen3_30b_a3b", world=8, train="tp=4,ep=8", rollout="tp=8", rank=3),
    Case(model="qwen3_235b_a22b", world=64, train="tp=4,pp=4,ep=16", rollout="tp=16,ep=16", rank=21),
    Case(model="glm4_5_355b", world=128, train="tp=4,pp=4,ep=32", rollout="tp=16,ep=16", rank=77),
    Case(model="deepseek_v3", world=256, train="pp=16,ep=16", rollout="tp=32,ep=32", rank=100),
    Case(model="deepseek_v3", world=1024, train="pp=16,ep=64", rollout="tp=32,ep=32", rank=0),
    Case(model="deepseek_v3", world=1024, train="pp=16,ep=64", rollout="tp=32,ep=32", rank=777),
)


class Single:
    """A layout in which no tensor is said to lie like another."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.weights: WeightMap = layout.weights
        self.ranks: Sequence[int] = layout.ranks

    def params(self, rank: int) -> Mapping[str, Param]:
        return self._layout.params(rank)

    def pieces(self, rank: int) -> Sequence[Piece]:
        return self._layout.pieces(rank)

    def holders(self, tensor: str) -> Sequence[Holder]:
        return self._layout.holders(tensor)

    def alike(self, tensor: Tensor) -> Hashable:
        return tensor.name


def measure(case: Case, *, baseline: bool) -> dict[str, object]:
    """Plans one case in this process."""
    wall, processor = time.perf_counter(), time.process_time()
    spec = replace(find_model(case.model), mtp_layers=0)
    source = train_layout(spec, case.world, parse_sizes(case.train, TRAIN_KEYS))
    destination = rollout_layout(source, case.world, parse_sizes(case.rollout, ROLLOUT_KEYS), mtp=False)
    sides: tuple[Layout, Layout] = (source, destination)
    planner = Planner(*(map(Single, sides) if baseline else sides), ranks_per_node=8)
    plan = planner.plan(case.rank)
    seconds, processor = time.perf_counter() - wall, time.process_time() - processor
    return {
        **asdict(case),
        "method": "every tensor" if baseline else "kinds",
        "seconds": seconds,
        "processor_seconds": processor,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "received_bytes": plan.received_bytes,
        "rounds": len(plan.rounds),
        "segments": sum(len(m.segments) for r in plan.rounds for m in (*r.sends, *r.receives)),
    }


def main() -> None:
    """Runs every case in a process of its own, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--baseline", action="store_true", help="also plan without kinds (minutes)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(CASES[options.case], baseline=options.baseline)))
        return
    results = []
    print("model            world  rank       method  wall s  cpu s peak MiB  recv GB")
    for index in range(len(CASES)):
        for flags in [[], ["--baseline"]] if options.baseline else [[]]:
            command = [sys.executable, __file__, "--case", str(index), *flags]
            one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results.append(one)
            sizes = f"{one['peak_rss_bytes'] / 2**20:8.0f} {one['received_bytes'] / 1e9:8.3f}"
            print(
                f"{one['model']:16} {one['world']:5} {one['rank']:5} {one['method']:>12} {one['seconds']:7.2f} "
                f"{one['processor_seconds']:6.2f} {sizes}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
