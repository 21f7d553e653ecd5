"""Weight sync between equal layouts, where the engine reads the trainer's storage: does it cost more for larger models?

    python benchmarks/equal_layouts.py --json FILE                            # 4 gloo ranks, a stand-in for the engine
    .venv-sglang/bin/python benchmarks/equal_layouts.py --sglang --ranks 2    # SGLang in the ranks, and publishing

A time is that of the slowest rank, and a median over `--syncs` after a warm-up. See benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from hybridrl.models.families import load_spec, weight_map
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.aliasing import Adopt, adopt_data
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.sync import WeightSync

MODELS: Mapping[str, Mapping[str, int]] = {
    "small": {"hidden_size": 160, "moe_intermediate_size": 80, "vocab_size": 1024, "num_hidden_layers": 4},
    "ten times the size": {"hidden_size": 512, "moe_intermediate_size": 256, "vocab_size": 4096},
    "ten times the parameters": {"hidden_size": 64, "moe_intermediate_size": 40, "num_hidden_layers": 40},
}
"""Qwen3-MoE models, by what sets them apart from the first."""
TIMES = 2.0
"""A larger model's sync may take so many times as long as the small one's."""
PER_PARAMETER = 0.5e-6
"""Seconds that the check of a parameter's address may take, on each side."""
MOVED = ("sync/received_bytes", "sync/sent_bytes", "sync/copied_bytes")


def main() -> None:
    """Starts the ranks, prints a table and what must hold, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only these, the small one first")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--syncs", type=int, default=200, help="timed syncs of each model")
    parser.add_argument("--sglang", action="store_true", help="with SGLang in the ranks' own processes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        for name, sizes in MODELS.items():
            _write_config(Path(parent) / name, sizes)
        multiprocessing.spawn(_rank, (options, Path(parent)), nprocs=options.ranks)
        rows = json.loads((Path(parent) / "rows.json").read_text())
    print(render(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _write_config(folder: Path, sizes: Mapping[str, int]) -> None:
    from transformers import Qwen3MoeConfig

    hidden = sizes["hidden_size"]
    chosen: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 4, **sizes}
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        dtype="float32",
        **chosen,
    ).save_pretrained(folder)


def _rank(rank: int, options: argparse.Namespace, parent: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    store = dist.FileStore(f"{parent}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    rows = []
    for name in options.model or MODELS:
        with _served(parent / name, sglang=options.sglang) as (layout, parameters, adopt, publish):
            rows.append({"model": name, **_measure(layout, parameters, adopt, publish, options.syncs)})
    if rank == 0:
        (parent / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


Served = tuple[SGLangLayout, Mapping[str, torch.Tensor], Adopt, Callable[[int], None]]
"""An engine's layout and live parameters, how it takes other storage for them, and what puts a version in service."""


@contextmanager
def _served(folder: Path, *, sglang: bool) -> Iterator[Served]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if sglang:
        from hybridrl.rollout.sglang.engine import SGLangEngine
        from hybridrl.rollout.sglang.options import EngineOptions

        sizes: dict[str, Any] = {"tp": world, "ep": world, "max_positions": 512, "kv_tokens": 2048}
        engine = SGLangEngine(EngineOptions(folder=folder, dtype="float32", device="cpu", **sizes))
        yield engine.layout, engine.parameters(), engine.adopt, engine.publish
        engine.close()
        return
    layout = SGLangLayout(weight_map(load_spec(folder)), RolloutSizes(world=world, tp=world, ep=world))
    parameters = {name: torch.zeros(param.shape) for name, param in layout.params(rank).items()}
    yield layout, parameters, adopt_data(parameters), lambda version: None


def _measure(
    layout: SGLangLayout,
    parameters: Mapping[str, torch.Tensor],
    adopt: Adopt,
    publish: Callable[[int], None],
    syncs: int,
) -> dict[str, Any]:
    """A row: medians of seconds of a sync and, with it, of putting its version in service."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = MegatronLayout(layout.weights, ParallelSizes(world=world, tp=world, ep=world), engine_order=True)
    tensors = {name: torch.randn(param.shape) for name, param in trained.params(rank).items()}
    taken = []
    with WeightSync(trained, tensors, layout, parameters, rank, adopt=adopt) as sync:
        for version in range(syncs + syncs // 10):
            dist.barrier()
            start = time.perf_counter()
            metrics = sync.run(version)
            synced = time.perf_counter()
            publish(version)
            taken.append((synced - start, time.perf_counter() - start))
        slowest = torch.tensor(taken[-syncs:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        sync_seconds, service_seconds = (statistics.median(column.tolist()) for column in slowest.unbind(1))
    return {
        "sync_seconds": sync_seconds,
        "service_seconds": service_seconds,
        "moved_bytes": sum(metrics[key] for key in MOVED),
        "model_bytes": layout.weights.nbytes,
        "parameters": len(parameters),
        "shared": metrics["sync/aliased_bytes"] == sum(tensor.nbytes for tensor in parameters.values()),
    }


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each model, and each requirement with whether it holds."""
    lines = [f"{'model':26} {'MB':>7} {'parameters':>10} {'sync ms':>8} {'and in service ms':>17}"]
    lines += [
        f"{row['model']:26} {row['model_bytes'] / 1e6:7.1f} {row['parameters']:10} {row['sync_seconds'] * 1e3:8.3f} "
        f"{row['service_seconds'] * 1e3:17.3f}"
        for row in rows
    ]
    lines += ["", "must hold:"]
    small = rows[0]
    for row in rows:
        lines.append(_held(row["shared"] and not row["moved_bytes"], f"{row['model']}: shared whole, nothing moved"))
    for row in rows[1:]:
        checks = 2 * PER_PARAMETER * (row["parameters"] - small["parameters"])
        for key in ("sync_seconds", "service_seconds"):
            most = max(TIMES * small[key], small[key] + checks)
            text = f"{row['model']}: {row[key] * 1e3:.3f} ms ({key}), at most {most * 1e3:.3f}"
            lines.append(_held(row[key] <= most, text))
    return "\n".join(lines)


def _held(holds: bool, text: str) -> str:
    return f"  {'holds' if holds else 'FAILS'}  {text}"


if __name__ == "__main__":
    main()
