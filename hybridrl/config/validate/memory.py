"""Time-sharing the device: places that contradict each other, and allocator settings under which memory stays held."""

import os
from collections.abc import Iterator, Mapping

from hybridrl.config.schema import Config

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def memory_problems(config: Config, device: str | None, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Mistakes in `memory`, and in the allocator's settings on a GPU."""
    memory, rollout = config.memory, config.rollout
    to_disk = [k for k in ("optimizer", "reference", "critic") if getattr(memory, k) == "disk"]
    if memory.arena_dir is not None and memory.arena != "disk" and not to_disk:
        yield f"memory.arena_dir={memory.arena_dir}, but nothing goes to disk; set memory.arena=disk or leave it null"
    if memory.parameters == "single":
        yield from _single_problems(config)
    expandable = next((n for n in ALLOCATOR_VARIABLES if _expandable(environment.get(n, ""))), None)
    if expandable is None or "cuda" not in (device, config.trainer.device) or rollout.engine != "sglang":
        return
    if rollout.sglang.hosting == "subprocess":
        yield (
            f"{expandable}={environment[expandable]}: memory of expandable segments cannot be opened by another "
            "process, as rollout.sglang.hosting=subprocess needs for its weights; unset it, or set hosting=in_process"
        )


def _single_problems(config: Config) -> Iterator[str]:
    """What one copy of the weights cannot go with."""
    if config.rollout.engine == "sglang" and config.rollout.sglang.hosting == "subprocess":
        yield (
            "memory.parameters=single with rollout.sglang.hosting=subprocess: the subprocess has a copy of the weights "
            "of its own; set hosting=in_process, or memory.parameters=offload"
        )
    if config.reshard.verify:
        yield (
            "memory.parameters=single with reshard.verify=true: the check reads the trainer's copy after it was given "
            "back; leave it out, or set memory.parameters=keep"
        )


def _expandable(setting: str) -> bool:
    return "expandable_segments:true" in setting.lower().replace(" ", "")
