"""What a weight sync of DeepSeek-V3 costs on 256, 1,024 and 4,096 ranks: planned, not run.

    python benchmarks/scale.py --json FILE --plot FILE.png

Each case is planned in a fresh process: seconds and memory that one rank's planning takes, bytes of the busiest rank by
link, the predicted seconds of a sync, and the floor of the links: the busiest rank's bytes at the full rate of each
link, without latency, packing or copies. Bandwidths are nominal (`conf/interconnect`); nothing else uses the links.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.reshard.cost import plan_seconds
from hybridrl.reshard.explain import (
    ROLLOUT_KEYS,
    TRAIN_KEYS,
    find_interconnect,
    find_model,
    parse_sizes,
    rollout_layout,
    train_layout,
)
from hybridrl.reshard.planner import Planner

PUBLISHED = (
    ("Kimi-K2 (1 T), one-sided RDMA, 256 to 128 GPUs (Perplexity)", 1.3),
    ("DeepSeek-V3, NeMo-RL nccl_reshard, experts and MLPs alone", 2.4),
    ("1 T, Awex, RDMA", 6.0),
    ("Kimi-K2 fp8, checkpoint-engine", 14.0),
)
"""What others publish, in seconds: other models, precisions and numbers of GPUs, so a yardstick and no race."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One world."""

    world: int
    train: str
    rollout: str
    model: str = "deepseek_v3"
    interconnect: str = "h800"


CASES = (
    Case(world=256, train="pp=16,ep=16", rollout="tp=32,ep=32"),
    Case(world=1024, train="pp=16,ep=64", rollout="tp=32,ep=32"),
    Case(world=4096, train="pp=16,ep=64", rollout="tp=32,ep=32"),
)


def measure(case: Case) -> dict[str, Any]:
    """Plans one case in this process."""
    link = find_interconnect(case.interconnect)
    start = time.perf_counter()
    spec = replace(find_model(case.model), mtp_layers=0)
    source = train_layout(spec, case.world, parse_sizes(case.train, TRAIN_KEYS))
    destination = rollout_layout(source, case.world, parse_sizes(case.rollout, ROLLOUT_KEYS), mtp=False)
    planner = Planner(source, destination, ranks_per_node=link.ranks_per_node)
    planner.plan(case.world // 3)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    routes = planner.routes
    moved = routes.direct + routes.relayed
    nodes = np.arange(case.world) // link.ranks_per_node
    near = nodes[:, None] == nodes
    busiest = [int(max(part.sum(0).max(), part.sum(1).max())) for part in (moved * near, moved * ~near)]
    rounds = planner.direct.count + planner.relayed.count
    return {
        **asdict(case),
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "node_bytes_max": busiest[0],
        "network_bytes_max": busiest[1],
        "total_bytes": int(moved.sum()),
        "rounds": rounds,
        "predicted_seconds": plan_seconds(link, routes.direct, routes.relayed, routes.copied, rounds),
        "floor_seconds": link.seconds(node=busiest[0], network=busiest[1], device=0, rounds=0),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: predicted seconds and the floor by ranks, beside what others publish."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    ranks = [one["world"] for one in results]
    axes.plot(ranks, [one["predicted_seconds"] for one in results], "o-", label="DeepSeek-V3 bf16, predicted")
    axes.plot(ranks, [one["floor_seconds"] for one in results], "o--", label="the same, floor of the links")
    for k, (name, seconds) in enumerate(PUBLISHED):
        axes.axhline(seconds, linestyle=":", color=f"C{k + 2}", label=f"{name}: {seconds} s")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a sync", xticks=ranks)
    axes.set_xticklabels([f"{n:,}" for n in ranks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Runs every case in a process of its own, prints a table and writes JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(CASES[options.case])))
        return
    results = []
    print("model         world  plan s  peak MiB  node GB  network GB  rounds  predicted s  floor s")
    for index in range(len(CASES)):
        command = [sys.executable, __file__, "--case", str(index)]
        one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        results.append(one)
        print(
            f"{one['model']:12} {one['world']:6} {one['seconds']:7.2f} {one['peak_rss_bytes'] / 2**20:9.0f} "
            f"{one['node_bytes_max'] / 1e9:8.2f} {one['network_bytes_max'] / 1e9:11.2f} {one['rounds']:7} "
            f"{one['predicted_seconds']:12.2f} {one['floor_seconds']:8.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
