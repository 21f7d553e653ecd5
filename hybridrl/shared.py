"""How trainer and engine of a run share the device: the way of the weights between them, and what leaves when."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridrl.memory.region import Region
from hybridrl.memory.single import SingleWeights
from hybridrl.memory.timeshare import TimeShare
from hybridrl.reshard.sync import WeightSync
from hybridrl.rollout.engine import SharingEngine

if TYPE_CHECKING:
    from hybridrl.session import Session


def device_bytes(device: torch.device) -> int | None:
    """A GPU's memory; None of a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def share_device(session: "Session", stack: ExitStack) -> TimeShare:
    """The phases of a run whose policy and engine are made; `stack` closes the way of the weights. Collective."""
    config, region = session.config, session.actor.region
    way = _sync(session) if region is None else _single(session, region)
    stack.callback(way.close)
    beside = config.rollout.engine == "sglang" and config.rollout.sglang.hosting == "subprocess"
    return TimeShare(
        config.memory,
        session.actor,
        session.engine,
        way if isinstance(way, SingleWeights) else way.run,
        staging=way.staging if isinstance(way, SingleWeights) else way.executor.staging.tensors,
        regions=(region, way.engine_region if isinstance(way, SingleWeights) else None),
        device=session.device,
        device_bytes=device_bytes(session.device),
        folder=Path(config.memory.arena_dir or session.folder / "arena"),
        reference=session.wants_reference,
        critic=session.critic,
        give_back=torch.cuda.empty_cache if session.device.type == "cuda" and beside else None,
    )


def _sync(session: "Session") -> WeightSync:
    config, engine = session.config, session.engine
    return WeightSync(
        session.actor.layout,
        session.actor.tensors(),
        engine.layout,
        engine.parameters(),
        session.rank,
        bucket_bytes=config.reshard.bucket_bytes,
        ranks_per_node=config.trainer.ranks_per_node,
        verify=config.reshard.verify,
        adopt=engine.adopt if isinstance(engine, SharingEngine) else None,
    )


def _single(session: "Session", region: Region) -> SingleWeights:
    config, engine = session.config, session.engine
    if not isinstance(engine, SharingEngine):
        raise TypeError(f"{type(engine).__name__} cannot take storage that comes and goes with the phases")
    return SingleWeights(
        session.actor.layout,
        session.actor.tensors(),
        region,
        engine.layout,
        engine.parameters(),
        session.rank,
        adopt=engine.adopt,
        bucket_bytes=config.reshard.bucket_bytes,
        ranks_per_node=config.trainer.ranks_per_node,
    )
