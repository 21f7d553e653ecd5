"""Weight sync by plan against gathering whole tensors, the golden path and Megatron's own resharding.

    python benchmarks/reshard.py --json FILE                           # 4 gloo ranks on this machine
    torchrun --nproc-per-node 4 benchmarks/reshard.py --json FILE      # on NCCL where there are GPUs

All methods move the same tensors in the same run, in turns and in both orders, so that a busy machine slows them alike.
A time is that of the slowest rank, and a median over `--syncs` after a warm-up. See benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.reshard_cases import CASES, SMOKE, WORLD, Case
from benchmarks.reshard_gather import GatherMethod
from benchmarks.reshard_megatron import ABSENT, MegatronMethod
from benchmarks.reshard_memory import Peak
from benchmarks.reshard_methods import AllToAll, GoldenMethod, Method, PlanMethod, Sides
from benchmarks.reshard_table import judge, render
from hybridrl.reshard.golden import box_slices
from hybridrl.reshard.layout import Layout


def main() -> None:
    """Starts the ranks, or joins those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--syncs", type=int, default=7, help="timed syncs of each method")
    parser.add_argument("--transport", choices=["gloo"], help="the plan's, instead of what suits the machine")
    parser.add_argument("--smoke", action="store_true", help="small models: whether it runs, not how fast")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        _run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_spawned, (options, f"{folder}/store"), nprocs=WORLD)


def _spawned(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    _run(options)


def _run(options: argparse.Namespace) -> None:
    if dist.get_world_size() != WORLD:
        raise SystemExit(f"the cases are for {WORLD} ranks, {dist.get_world_size()} were started")
    results: list[dict[str, Any]] = []
    for case in CASES:
        if case.name in (options.case or (SMOKE if options.smoke else [c.name for c in CASES])):
            results += measure(case.shrunk() if options.smoke else case, options.syncs, options.transport)
    if dist.get_rank() == 0:
        print(render(results))
        if not options.smoke:
            print(judge(results))
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def measure(case: Case, syncs: int, transport: str | None) -> list[dict[str, Any]]:
    """A row for each method."""
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source, destination = case.layouts()
    sides = Sides(
        source=source,
        destination=destination,
        trained=_shard(source, rank, device, filled=True),
        served=_shard(destination, rank, device, filled=False),
        rank=rank,
        device=device,
        bucket_bytes=case.bucket_bytes,
        clock=_clock(device),
        transport=transport,
        share=case.engine_order,
    )
    methods: dict[str, Method] = {}
    peaks: dict[str, int] = {}
    correct: dict[str, torch.Tensor] = {}
    kinds: dict[str, Any] = {"golden": GoldenMethod, "gather": GatherMethod, "plan": PlanMethod}
    if case.retrain is not None:
        kinds["megatron"] = MegatronMethod
    for name, kind in kinds.items():
        for tensor in sides.served.values():
            tensor.view(torch.uint8).fill_(255)
        peak = Peak(device)
        methods[name] = kind(sides)
        methods[name].run()
        peaks[name] = peak.bytes()
        if not correct:
            correct = {key: value.clone() for key, value in sides.served.items()}
        _require_same(case, name, methods[name].sides.served, correct)
    plan = methods["plan"]
    assert isinstance(plan, PlanMethod)
    seconds = _interleaved({**methods, "alltoall": AllToAll(plan, sides)}, syncs, device)
    arrived = _highest([plan.received_bytes, plan.lower_bound_bytes], device)
    rate = None if not arrived[0] else arrived[0] / seconds["alltoall"]["total"] / 1e9
    rows = []
    for name, method in methods.items():
        received, staging, peak_bytes = _highest(
            [method.received_bytes, method.staging_bytes or 0, peaks[name]], device
        )
        moving = seconds[name].get("rounds", seconds[name]["total"])
        rows.append(
            {
                "case": case.name,
                "method": name,
                "seconds_median": seconds[name]["total"],
                "bytes_received_max": received,
                "lower_bound_max": arrived[1],
                "gb_per_s": received / moving / 1e9 if received else None,
                "alltoall_gb_per_s": rate if name == "plan" else None,
                "copy_seconds": seconds[name].get("copy"),
                "staging_peak_bytes": staging if method.staging_bytes is not None else None,
                "aliased_bytes": plan.sync.aliased_bytes if name == "plan" else 0,
                "bucket_bytes": case.bucket_bytes,
                "peak_bytes": peak_bytes,
                "model_bytes": source.weights.nbytes,
                "backend": dist.get_backend(),
            }
        )
    if "megatron" not in methods:
        rows.append({"case": case.name, "method": "megatron", "seconds_median": None, "absent": ABSENT})
    return rows


def _interleaved(methods: dict[str, Any], syncs: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Medians of each method's seconds, of which each is the slowest rank's."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    for number in range(syncs + 1):
        turns = list(methods.items())
        for name, method in turns if number % 2 else reversed(turns):
            taken = method.run()
            slowest = torch.tensor(list(taken.values()), dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            for part, value in zip(taken, slowest.tolist(), strict=True):
                if number:
                    found[name].setdefault(part, []).append(value)
    return {name: {part: statistics.median(values) for part, values in parts.items()} for name, parts in found.items()}


def _shard(layout: Layout, rank: int, device: torch.device, *, filled: bool) -> dict[str, torch.Tensor]:
    """The rank's parameters, holding numbers that differ between elements and tensors, or nothing."""
    if rank not in layout.ranks:
        return {}
    params = {
        name: torch.zeros(param.shape, dtype=getattr(torch, param.dtype), device=device)
        for name, param in layout.params(rank).items()
    }
    index = {tensor.name: i for i, tensor in enumerate(layout.weights)}
    for piece in layout.pieces(rank) if filled else ():
        tensor = layout.weights[piece.tensor]
        codes = (torch.arange(tensor.size, device=device) * 40503 + index[piece.tensor] * 977) % 65521
        view = params[piece.param][piece.slices]
        view.copy_((codes / 32760 - 1).view(tensor.shape)[box_slices(piece.box)].view(view.shape))
    return params


def _require_same(case: Case, name: str, found: Any, expected: Any) -> None:
    for key, value in expected.items():
        if not torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)):
            raise SystemExit(
                f"{case.name}, {name}: rank {dist.get_rank()} has other bits in {key} than the golden path"
            )


def _highest(values: list[int], device: torch.device) -> list[int]:
    """The most on any rank."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _clock(device: torch.device) -> Any:
    """A clock that all ranks read together, when the device is done: no phase is charged for another's stragglers."""

    def aligned() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        return time.perf_counter()

    return aligned


if __name__ == "__main__":
    main()
