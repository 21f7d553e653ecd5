"""From `rollout.engine` to the engine. Each is imported only where it is asked for."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.models.spec import ModelSpec
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.placement import place
from hybridrl.rollout.engine import Engine


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
) -> Engine:
    """This rank's engine over the model in `folder`, with the tokenizer of its folder, on the existing world.

    `stack` closes it. `training` is where the trainer keeps the weights: `reshard.placement=auto` puts ranks where most
    bytes stay. Collective. Raises ValueError for an engine that is none, and what the engine's constructor raises.
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
