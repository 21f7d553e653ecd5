"""Saving a checkpoint: how long training stands still, asynchronous against synchronous, and the rate of writing.

    python benchmarks/checkpoint.py --json FILE                             # one rank
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --json FILE        # more of them, on NCCL where there are GPUs

A small MoE trains (AdamW; weights, masters and moments are saved) and saves in turns by three methods:

- `synchronous`: hybridrl's save with `checkpoint.asynchronous=false`;
- `asynchronous`: the same from a copy in host memory, while steps go on;
- `plain`: as many bytes written to one file a rank, synced to disk; no copy, digest, index or reading back.

`stall_seconds` are those in which no step can be made: for the asynchronous save its start and the calls after each
step that ask whether it is whole. `slower_seconds` are what the `steps` beside it took longer than alone.
`whole_seconds` pass until the checkpoint has its name. Medians over `--repeats`, of the slowest rank, after one save of
each.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint.save import Saver
from hybridrl.checkpoint.shards import Model
from hybridrl.config.schema import CheckpointConfig, Config
from hybridrl.models.families import load_spec
from hybridrl.parallel import groups
from hybridrl.parallel.device import choose_device
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.training.actor import Actor
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import Row

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 4096, "num_experts": 16}
SMOKE = {"hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": 64, "num_experts": 4}
ROWS, LENGTH = 8, 64
ALONE = 5
"""Steps without a save, for the time of one."""
METHODS = ("synchronous", "asynchronous", "plain")

Times = dict[str, float]


def make_folder(folder: Path, sizes: dict[str, int]) -> None:
    """A random model in a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **rest, num_experts_per_tok=2, intermediate_size=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Training:
    """An actor on this rank's world, and steps of it."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        world = ParallelSizes(world=dist.get_world_size())
        groups.initialize(world)
        config = Config()
        config.algorithm.name = "sft"
        config.trainer.ranks_per_node = world.world
        self.actor = Actor(config, load_spec(folder), world, folder=folder, total_updates=1000)
        self._loss = make_loss(config.algorithm, LENGTH)
        tokens = torch.randint(sizes["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).numpy()
        mask = torch.arange(LENGTH).numpy() > 0
        self._rows = [Row(index=i, token_ids=one, mask=mask) for i, one in enumerate(tokens)]
        self.seconds = 0.0
        """Of a step alone."""

    def step(self) -> None:
        self.actor.update(self._rows, self._loss)

    def measure(self) -> None:
        """Makes moments, and times steps alone."""
        self.step()
        self.seconds = statistics.median(_timed(self.step) for _ in range(ALONE))

    def model(self) -> Model:
        parts = self.actor.optimizer.inner.chained_optimizers
        return Model("policy", self.actor.layout, dist.get_rank(), self.actor.tensors, parts)


class Saving:
    """Saves of one kind into a folder of their own, which keeps the newest alone."""

    def __init__(self, folder: Path, training: Training, *, asynchronous: bool) -> None:
        config = CheckpointConfig(asynchronous=asynchronous, keep_last=1, retries=0)
        self.folder, self._training = folder, training
        self._saver = Saver(folder, config, dist.get_rank(), print)
        self._done = 0

    def __call__(self) -> Times:
        """One save, with steps beside it until it is whole."""
        self._done += 1
        states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        models, steps = [self._training.model()], 0
        began = time.perf_counter()
        stall = _timed(lambda: self._saver.start(self._done, models, states, None))
        while self._saver.in_flight is not None:
            self._training.step()
            steps += 1
            stall += _timed(self._saver.poll)
        whole = time.perf_counter() - began
        slower = whole - stall - steps * self._training.seconds
        return {"stall_seconds": stall, "slower_seconds": slower, "whole_seconds": whole, "steps": steps}

    def nbytes(self) -> list[int]:
        """Bytes of each rank's files; rank 0's are all that are not another's."""
        sizes = {path.name: path.stat().st_size for path in self.folder.glob("*/*")}
        others = [sizes.get(f"__{rank}_0.distcp", 0) for rank in range(1, dist.get_world_size())]
        return [sum(sizes.values()) - sum(others), *others]


class PlainWrite:
    """As many bytes in one file."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._path = folder / f"plain-{dist.get_rank()}"
        self._content = torch.randint(256, (nbytes,), dtype=torch.uint8).numpy()

    def __call__(self) -> Times:
        """Written, synced, and removed outside the time."""

        def write() -> None:
            with self._path.open("wb", buffering=0) as file:
                left = memoryview(self._content)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())

        seconds = _timed(write)
        self._path.unlink()
        return {"stall_seconds": seconds, "slower_seconds": 0.0, "whole_seconds": seconds, "steps": 0}


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _slowest(times: Times) -> Times:
    everyone: list[Times] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, times)
    return {key: max(one[key] for one in everyone) for key in times}


def measure(folder: Path, sizes: dict[str, int], repeats: int) -> dict[str, Any]:
    """Saves by each method in turn; `rows` has one for each."""
    training = Training(folder / "model", sizes)
    training.measure()
    saves = {kind: Saving(folder / kind, training, asynchronous=kind == METHODS[1]) for kind in METHODS[:2]}
    first = {kind: _slowest(save()) for kind, save in saves.items()}
    nbytes = saves["synchronous"].nbytes()
    methods: dict[str, Callable[[], Times]] = {**saves, "plain": PlainWrite(folder, nbytes[dist.get_rank()])}
    first["plain"] = _slowest(methods["plain"]())
    times: dict[str, list[Times]] = {kind: [] for kind in METHODS}
    for _ in range(repeats):
        for kind, save in methods.items():
            dist.barrier()
            times[kind].append(_slowest(save()))
    rows = []
    for kind, found in times.items():
        row = {key: statistics.median(one[key] for one in found) for key in found[0]}
        rate = sum(nbytes) / row["whole_seconds"] / 1e9
        rows.append({"method": kind, **row, "first_stall_seconds": first[kind]["stall_seconds"], "gb_per_s": rate})
    return {
        "ranks": dist.get_world_size(),
        "bytes": sum(nbytes),
        "step_seconds": training.seconds,
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }


def render(result: dict[str, Any]) -> str:
    """A table."""
    lines = [
        f"{result['bytes'] / 1e6:.0f} MB from {result['ranks']} ranks, a step of {result['step_seconds']:.3f} s, "
        f"load average {result['load_average']:.1f}",
        f"{'method':14}{'stall s':>9}{'first s':>9}{'slower s':>10}{'whole s':>9}{'GB/s':>7}",
    ]
    lines += [
        f"{row['method']:14}{row['stall_seconds']:9.3f}{row['first_stall_seconds']:9.3f}"
        f"{row['slower_seconds']:10.3f}{row['whole_seconds']:9.3f}{row['gb_per_s']:7.2f}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--repeats", type=int, default=5, help="timed saves of each method")
    parser.add_argument("--folder", type=Path, help="writes below this folder, on the disk that is asked about")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether it runs, not how fast")
    options = parser.parse_args()
    device = choose_device()
    groups.start_world(device)
    sizes = SMOKE if options.smoke else SIZES
    names = [tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    try:
        if dist.get_rank() == 0:
            make_folder(folder / "model", sizes)
        dist.barrier()
        result = measure(folder, sizes, options.repeats)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if dist.get_rank() == 0:
        print(render(result))
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    groups.shutdown(world=True)


if __name__ == "__main__":
    main()
