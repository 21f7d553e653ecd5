"""How much memory a switch of one copy of the weights takes, by the kernel's own peak. Runs on the pool's ranks."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridrl.memory.region import Region
from hybridrl.models.families import weight_map
from hybridrl.models.spec import MoeSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from tests.distributed.single_runs import make_single
from tests.reshard.simulated import MOE


class Switch(NamedTuple):
    """One way of one rank, in bytes."""

    peak: int
    """Most of the weights, by growth of the resident set, and staging."""
    allowed: int
    """The larger of both sides, and two buckets."""


def moe_bytes(hidden: int) -> tuple[object, int]:
    """A model of 16 experts in each of 4 layers, and its bytes."""
    moe = MoeSpec(num_experts=16, top_k=2, ffn_size=hidden, norm_topk_prob=True, layers=(True,) * 4)
    spec = replace(MOE, moe=moe, hidden_size=hidden, head_dim=hidden // 8, vocab_size=2048)
    return spec, sum(4 * tensor.size for tensor in weight_map(spec))


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def switches(
    hidden: int, train: dict[str, int], rollout: dict[str, int], order: bool, bucket_bytes: int
) -> list[Switch] | None:
    """The peaks of three ways there and back; None where the kernel does not start its peak afresh."""
    spec, _ = moe_bytes(hidden)
    weights, world = weight_map(spec), dist.get_world_size()  # type: ignore[arg-type]
    source = MegatronLayout(weights, ParallelSizes(world=world, **train), engine_order=order, dtype="float32")
    destination = SGLangLayout(weights, RolloutSizes(world=world, **rollout), dtype="float32")
    trained, served, single = make_single(source, destination, bucket_bytes, Region)
    for value in trained.values():
        value.fill_(1.0)
    del served
    torch.zeros(1)
    single.to_rollout(0)  # from here on, staging is resident
    single.to_training()
    ours, theirs = single.region, single.engine_region
    staging = sum(one.staging.nbytes for one in single._executors.values())
    shared = single.aliased_bytes
    larger = max(ours.nbytes, theirs.nbytes + shared)
    found = []
    for version in range(1, 4):
        for way in (lambda v=version: single.to_rollout(v), single.to_training):
            held = ours.committed_bytes + theirs.committed_bytes
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                return None
            before = _status("VmRSS")
            dist.barrier()
            way()
            found.append(Switch(_status("VmHWM") - before + held + staging, larger + 2 * bucket_bytes))
    single.close()
    return found
