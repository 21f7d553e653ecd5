"""From `rollout.engine` to the engine. Each is imported only where it is asked for."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.memory.policies import cache_room
from hybridrl.models.spec import ModelSpec
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.placement import place
from hybridrl.rollout.engine import Engine

if TYPE_CHECKING:
    from hybridrl.rollout.sglang.options import EngineOptions


def installed_problems(config: Config) -> list[str]:
    """What is wrong with a configuration by the engine's own word, before one is made. Pure and quick."""
    if config.rollout.engine != "sglang" or is_supervised(config):
        return []
    from hybridrl.rollout.sglang.options import installed_problems

    return installed_problems(config.rollout.sglang.server_args)


def make_engine(
    config: Config,
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    stack: ExitStack,
    training: Layout,
    tokenizer: Path,
    *,
    held_bytes: int = 0,
    device_bytes: int | None = None,
) -> Engine:
    """This rank's engine over the model in `folder`, with the tokenizer of its folder, on the existing world.

    `stack` closes it. `training` is where the trainer keeps the weights: `reshard.placement=auto` puts ranks where most
    bytes stay. Of `device_bytes` in all, `held_bytes` are the trainer's in a rollout: a KV cache whose size is not
    configured is no larger than what is then free (None: as large as it may need to be). Collective.

    Raises ValueError for an engine that is none, and what the engine's constructor raises.
    """
    if config.rollout.engine == "transformers":
        from hybridrl.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(
            folder,
            ranks=range(dist.get_world_size()),
            rank=dist.get_rank(),
            device=device,
            dtype=getattr(torch, config.model.dtype),
            max_batch_size=config.rollout.max_batch_size,
            release_weights=True,
            routed_experts=config.rollout.routed_experts,
            tokenizer=tokenizer if config.rollout.stop else None,
        )
    if config.rollout.engine == "sglang":
        from hybridrl.rollout.sglang.options import from_config

        options = from_config(config, folder, spec, device.type, tokenizer)
        if config.rollout.sglang.kv_tokens is None:
            options = _within(options, config, spec, held_bytes, device_bytes)
        if config.rollout.sglang.hosting == "subprocess":
            from hybridrl.rollout.sglang.process.engine import SGLangProcessEngine

            beside = SGLangProcessEngine(options)
            stack.callback(beside.close)
            return beside
        from hybridrl.rollout.sglang.engine import SGLangEngine
        from hybridrl.rollout.sglang.placing import layout_of

        if config.reshard.placement == "auto":
            chosen = place(training, layout_of(options), config.trainer.ranks_per_node)
            options = replace(options, ranks=chosen.ranks)
        engine = SGLangEngine(options, release_weights=True)
        stack.callback(engine.close)
        return engine
    raise ValueError(f"rollout.engine={config.rollout.engine!r} is none of transformers, sglang")


def _within(
    options: "EngineOptions", config: Config, spec: ModelSpec, held_bytes: int, device_bytes: int | None
) -> "EngineOptions":
    """The options with a KV cache that has room on every rank."""
    from hybridrl.rollout.sglang.options import with_room
    from hybridrl.rollout.sglang.placing import layout_of

    weights = sum(param.nbytes for param in layout_of(options).params(dist.get_rank()).values())
    rooms: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rooms, cache_room(config.memory, held_bytes + weights, device_bytes))
    known = [room for room in rooms if room is not None]
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    return with_room(options, spec, min(known), longest) if known else options
