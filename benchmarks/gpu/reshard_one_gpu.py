"""Local conversion of full-size Qwen3-30B-A3B layers on one device, against a plain copy of the same bytes.

    python benchmarks/gpu/reshard_one_gpu.py --layers 8 --json FILE

One rank holds whole layers as Megatron has them (interleaved qkv, one parameter an expert) and brings them into
SGLang's layout (stacked experts, q, k and v apart): all permutes and copies of a sync, and no exchange. The fraction of
a plain device copy's bandwidth should be 0.8 at least.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.explain import find_model
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.sync import WeightSync


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a name in conf/model or a Hugging Face folder")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, help="experts a layer, for a trial on a small machine")
    parser.add_argument("--syncs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = measure(_spec(options.model, options.layers, options.experts), options.syncs, device)
    print(
        f"{result['device']}: {result['bytes'] / 1e9:.2f} GB in {1e3 * result['seconds_median']:.2f} ms, "
        f"{result['gb_per_s']:.0f} GB/s, {result['fraction']:.2f} of a plain copy's {result['copy_gb_per_s']:.0f} GB/s "
        f"({result['copies']} copies in {result['calls']} calls)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(spec: ModelSpec, syncs: int, device: torch.device) -> dict[str, float | int | str]:
    """Medians over `syncs` of the conversion and of the copy, in turns."""
    weights = weight_map(spec)
    source = MegatronLayout(weights, ParallelSizes(world=1), vocab_multiple=64, transformer_engine=True)
    destination = SGLangLayout(weights, RolloutSizes(world=1))
    trained, served = _params(source, device), _params(destination, device)
    for value in trained.values():
        value.normal_()
    sync = WeightSync(source, trained, destination, served, 0, verify=True)
    sync.run(0)  # checked, and the warm-up
    batches = sync.executor._program.copies
    nbytes = sum(value.nbytes for batch in batches for value in batch.writes)
    half = nbytes // 2
    one, other = (torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2))

    def convert() -> None:
        for batch in batches:
            batch.run()

    def copy() -> None:
        other.copy_(one)
        one.copy_(other)

    taken: dict[str, list[float]] = {"convert": [], "copy": []}
    with torch.no_grad():
        for number in range(syncs + 1):
            for name, run in (("convert", convert), ("copy", copy)):
                seconds = _seconds(run, device)
                if number:
                    taken[name].append(seconds)
    conversion, plain = statistics.median(taken["convert"]), statistics.median(taken["copy"])
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "model_bytes": weights.nbytes,
        "bytes": nbytes,
        "seconds_median": conversion,
        "gb_per_s": nbytes / conversion / 1e9,
        "copy_gb_per_s": 2 * half / plain / 1e9,
        "fraction": nbytes / conversion / (2 * half / plain),
        "copies": sum(len(batch.writes) for batch in batches),
        "calls": len(batches),
    }


def _spec(name: str, layers: int, experts: int | None) -> ModelSpec:
    spec = find_model(name)
    moe = spec.moe and replace(spec.moe, layers=spec.moe.layers[:layers], num_experts=experts or spec.moe.num_experts)
    return replace(spec, num_layers=layers, moe=moe)


def _params(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(param.shape, dtype=getattr(torch, param.dtype), device=device)
        for name, param in layout.params(0).items()
    }


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Of one run; by events on a GPU, so that the host's part counts only where the device waits for it."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


if __name__ == "__main__":
    main()
