"""A dry run as text for a terminal and as plain data for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hybridrl.planning.advice import Advice, Changes
from hybridrl.planning.estimate import Estimate
from hybridrl.planning.hardware import GIB
from hybridrl.planning.search import Choice


def failed(errors: Sequence[str]) -> dict[str, Any]:
    """The data of a configuration that cannot run."""
    return {"fits": False, "errors": list(errors), "memory": {}, "switches": {}, "batch": {}, "step_seconds": {}}


def as_json(found: Estimate, advice: Advice | None, choices: Sequence[Choice]) -> dict[str, Any]:
    """Plain data: bytes, seconds, counts."""
    memory, cache, batch = found.memory, found.memory.cache, found.batch
    return {
        "fits": found.fits,
        "errors": [],
        "shortages": found.shortages,
        "advice": str(advice) if advice else None,
        "world": found.layouts.world,
        "parameters": {"total": found.parameters[0], "active": found.parameters[1]},
        "memory": {name: {**owners, "total": memory.total(name)} for name, owners in memory.phases.items()},
        "device_bytes": found.hardware.memory_bytes,
        "fullest_rank": memory.rank,
        "host": {**memory.host, "total": sum(memory.host.values())},
        "disk": {**memory.disk, "total": sum(memory.disk.values())},
        "kv_cache": asdict(cache) if found.reshard else None,
        "switches": {
            name: {
                "bytes": {
                    "node": one.node_bytes,
                    "network": one.network_bytes,
                    "host": one.host_bytes,
                    "device": one.device_bytes,
                },
                "seconds": one.seconds,
                "reshard_seconds": one.reshard_seconds,
                "host_seconds": one.host_seconds,
            }
            for name, one in found.switches.items()
        },
        "batch": {
            "prompts": batch.prompts,
            "samples_per_prompt": batch.n,
            "samples": batch.samples,
            "updates": batch.updates,
            "samples_per_update": batch.samples_per_update,
            "data_parallel_ranks": batch.dp,
            "samples_per_rank": batch.samples_per_rank,
            "micro_batches": found.micro_batches,
            "replicas": found.layouts.world // found.layouts.engine_sizes.tp,
        },
        "step_seconds": {**asdict(found.step), "total": found.step.total},
        "limit": found.limit,
        "search": [{"changes": one.changes, "step_seconds": one.estimate.step.total} for one in choices],
    }


def render(found: Estimate, advice: Advice | None, choices: Sequence[Choice]) -> str:
    """The dry run for people."""
    parts = [_head(found), _ranks(found), str(found.batch), f"{'micro-batches a rank':<26}{found.micro_batches:>8}"]
    parts += ["", _memory(found), "", _switches(found), "", _step(found), "", verdict(found, advice)]
    if choices:
        parts += ["", "layouts that fit, by seconds a step"]
        parts += [f"  {one.estimate.step.total:10.1f}  {shown(one.changes)}" for one in choices]
    return "\n".join(parts)


def shown(changes: Changes) -> str:
    """Overrides as they are typed, without the sizes that are 1 or unset."""
    return " ".join(f"{key}={value}" for key, value in changes.items() if value not in (1, None)) or "all sizes 1"


def verdict(found: Estimate, advice: Advice | None) -> str:
    """Whether it fits, and the nearest change that would."""
    if found.fits:
        return "fits"
    lines = ["does not fit", *(f"  {text}" for text in found.shortages)]
    lines.append(f"  would fit: {advice}" if advice else "  no single change that was tried makes it fit")
    return "\n".join(lines)


def _head(found: Estimate) -> str:
    total, active = found.parameters
    hardware, spec = found.hardware, found.layouts.spec
    nodes, ranks = found.config.trainer.nodes, found.config.trainer.ranks_per_node
    return (
        f"{spec.family}, {total / 1e9:,.1f} B parameters ({active / 1e9:,.1f} B a token), on {nodes} nodes of {ranks} "
        f"{hardware.name} ({hardware.memory_gib:g} GiB, {hardware.link.name})"
    )


def _ranks(found: Estimate) -> str:
    sizes, engine, world = found.layouts.sizes, found.layouts.engine_sizes, found.layouts.world
    dense = f"tp {sizes.tp} · cp {sizes.cp} · dp {sizes.dp} · pp {sizes.pp}"
    lines = [f"training  {dense}, experts etp {sizes.etp} · ep {sizes.ep} · edp {sizes.edp}"]
    if found.reshard is not None:
        models = f"{world // engine.tp} × tp {engine.tp} · dp {engine.dp} · ep {engine.ep}"
        lines.append(f"rollout   {models}: {world // engine.attention_tp} replicas")
    return "\n".join([*lines, ""])


def _memory(found: Estimate) -> str:
    memory = found.memory
    owners = list(dict.fromkeys(owner for phase in memory.phases.values() for owner in phase))
    lines = [
        f"memory of the fullest device (rank {memory.rank}), GiB of {found.hardware.memory_bytes / GIB:.1f} to use"
    ]
    lines.append("  " + f"{'':<14}" + "".join(f"{name:>12}" for name in memory.phases))
    for owner in owners:
        cells = (memory.phases[phase].get(owner, 0) / GIB for phase in memory.phases)
        lines.append("  " + f"{owner:<14}" + "".join(f"{cell:>12.2f}" for cell in cells))
    lines.append("  " + f"{'total':<14}" + "".join(f"{memory.total(phase) / GIB:>12.2f}" for phase in memory.phases))
    lines.append(
        f"  host memory a rank {sum(memory.host.values()) / GIB:.1f} GiB of {found.hardware.host_bytes / GIB:.1f}"
    )
    if disk := sum(memory.disk.values()) / GIB:
        node = disk * found.config.trainer.ranks_per_node
        lines.append(
            f"  drive of a node {node:.1f} GiB, {disk:.1f} a rank: look whether memory.arena_dir has that room"
        )
    if found.reshard is not None:
        cache = memory.cache
        lines.append(
            f"  KV cache {cache.tokens:,} tokens of {cache.wanted_tokens:,} wanted: {cache.sequences:,} of the longest "
            "sequences at once on a model's ranks"
        )
    return "\n".join(lines)


def _switches(found: Estimate) -> str:
    lines = ["switches, the busiest rank"]
    for name, one in found.switches.items():
        lines.append(
            f"  {name:<12} node {one.node_bytes / 1e9:8.3f} GB   network {one.network_bytes / 1e9:8.3f} GB   host "
            f"{one.host_bytes / 1e9:8.3f} GB   {one.seconds:7.3f} s"
        )
    return "\n".join(lines) if found.switches else "no switches: nothing is generated"


def _step(found: Estimate) -> str:
    rows = {**asdict(found.step), "total": found.step.total}
    lines = ["seconds of a step (assumed efficiencies: conf/hardware; rewards apart)"]
    lines += [f"  {name:<12}{value:>10.1f}" for name, value in rows.items()]
    return "\n".join([*lines, f"  limited by {found.limit}"])
