"""Who owns how many bytes of the fullest device, phase by phase, and of the host's memory beside it."""

from dataclasses import dataclass, replace

from hybridrl.config.schema import Config
from hybridrl.config.sections.memory import MemoryConfig
from hybridrl.models.families import weight_map, with_scalar_head
from hybridrl.planning.activations import activations
from hybridrl.planning.cache import KvCache, kv_cache
from hybridrl.planning.hardware import Hardware
from hybridrl.planning.layouts import Layouts, Shard, is_expert, training_shard
from hybridrl.planning.switches import Reshard

PREFILL_TOKENS = 8192
"""Tokens that the engine prefills at a time, SGLang's default on devices of 80 GB."""
FP32 = 4

Owners = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's bytes."""

    rank: int
    phases: dict[str, Owners]
    """By phase, then by owner."""
    host: Owners
    """In the host's memory."""
    disk: Owners
    """In a file on a drive of the node."""
    leaving: int
    """What goes from the device to the host with each rollout and comes back, on its way to a disk too."""
    cache: KvCache

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Of the fullest phase, the cache apart, which takes what is left."""
        return max(self.total(phase) - self.phases[phase].get("kv_cache", 0) for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The bytes of what a rank trains, without activations."""

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def trained(config: Config, layouts: Layouts, shard: Shard) -> Trained:
    """Megatron's buffers and optimizer: gradients in float32; masters where parameters are not float32 themselves.

    The distributed optimizer cuts dense state over DP·CP ranks, experts' over expert-data-parallel ones.
    """
    sizes, chosen = layouts.sizes, config.optimizer
    dense, expert = shard.dense, shard.expert
    if chosen.distributed:
        dense, expert = -(-dense // (sizes.dp * sizes.cp)), -(-expert // sizes.edp)
    states = 2 if chosen.name == "adam" else int(chosen.momentum > 0)
    return Trained(
        parameters=shard.nbytes,
        gradients=FP32 * (shard.dense + shard.expert),
        masters=0 if config.model.dtype == "float32" else FP32 * (dense + expert),
        moments=FP32 * states * (dense + expert),
    )


def rank_memory(config: Config, layouts: Layouts, reshard: Reshard | None, hardware: Hardware, rank: int) -> RankMemory:
    """The bytes of one rank; `reshard` is None where nothing is generated (supervised training)."""
    fused = layouts.transformer_engine
    own = trained(config, layouts, training_shard(layouts, rank))
    stage = layouts.sizes.coordinates(rank).pp
    forward = activations(config, layouts.spec, stage, fused=fused, backward=False).total
    backward = activations(config, layouts.spec, stage, fused=fused).total
    staging = reshard.staging_bytes(rank) if reshard else 0
    always = {"parameters": own.parameters, "staging": staging}
    valued = critic_of(config, layouts, rank)
    critic = {"critic": valued.total} if valued else {}
    update = {
        **always,
        **critic,
        "gradients": own.gradients,
        "masters": own.masters,
        "moments": own.moments,
        "activations": backward,
    }
    if reshard is None:
        return RankMemory(rank=rank, phases={"update": update}, host={}, disk={}, leaving=0, cache=_no_cache())
    kept = _kept_parameters(config, layouts, reshard, rank, own)
    rollout, leaves = _rollout(config, layouts, reshard, hardware, rank, own, {**always, "parameters": kept})
    stays = sum(critic.values()) if config.memory.critic == "none" else 0
    cache = kv_cache(config, layouts, max(0, hardware.memory_bytes - sum(rollout.values()) - stays))
    to_rollout = {name: size for name, size in rollout.items() if name != "activations"}
    away = _away(config, own, kept, leaves, valued)
    reference = {name: size for name, size in away["none"].items() if name == "reference"}
    if config.memory.critic == "none":
        to_rollout, rollout = to_rollout | critic, rollout | critic
    phases = {
        "to_rollout": to_rollout,
        "rollout": {**rollout, "kv_cache": cache.nbytes},
        "logprob": {**always, **critic, "activations": forward, **({} if leaves else _optimizer(own))},
        "update": update,
    }
    return RankMemory(
        rank=rank,
        phases={name: owners | reference for name, owners in phases.items()},
        host=away["host"],
        disk=away["disk"],
        leaving=sum(size for place in ("host", "disk") for name, size in away[place].items() if name != "reference"),
        cache=cache,
    )


def _optimizer(own: Trained) -> Owners:
    return {"masters": own.masters, "moments": own.moments}


def _rollout(
    config: Config, layouts: Layouts, reshard: Reshard, hardware: Hardware, rank: int, own: Trained, always: Owners
) -> tuple[Owners, bool]:
    """What is on the device beside the KV cache while it generates, and whether the optimizer's state has left."""
    spec, sizes = layouts.spec, layouts.engine_sizes
    aliased, engine = reshard.aliased_bytes(rank), reshard.engine_bytes(rank)
    together = kv_cache(config, layouts, None).sequences
    work = PREFILL_TOKENS * spec.hidden_size * 10 * 2 + together // sizes.dp * spec.vocab_size * 3 * FP32
    found = {**always, "engine": engine - aliased, "activations": work}
    if config.memory.gradients == "keep":
        found["gradients"] = own.gradients
    place = config.memory.optimizer
    wanted = kv_cache(config, layouts, None).nbytes
    fits = sum(found.values()) + own.optimizer + wanted + config.memory.margin_bytes <= hardware.memory_bytes
    leaves = place in ("host", "disk") or (place == "auto" and not fits)
    return (found, True) if leaves else (found | _optimizer(own), False)


def _kept_parameters(config: Config, layouts: Layouts, reshard: Reshard, rank: int, own: Trained) -> int:
    """Bytes of the trainer's parameters that are on the device in a rollout.

    A parameter that the engine shares stays. Where they are offloaded with a distributed optimizer its whole buffer
    does: Megatron lays those of experts into one and all others into another.
    """
    if config.memory.parameters == "keep":
        return own.parameters
    params, shared = layouts.training.params(rank), reshard.shared_params(rank)
    if config.memory.parameters == "offload" and config.optimizer.distributed:
        buffers = {is_expert(name) for name in shared}
        shared = {name for name in params if is_expert(name) in buffers}
    return sum(params[name].nbytes for name in shared)


def critic_of(config: Config, layouts: Layouts, rank: int) -> Trained | None:
    """The critic of PPO on this rank, in its own layout; None for other algorithms."""
    if config.algorithm.name != "ppo":
        return None
    own = {key: value for key, value in vars(config.critic.parallel).items() if value is not None}
    weights = weight_map(with_scalar_head(layouts.spec))
    critic = Layouts(replace(config, parallel=replace(config.parallel, **own)), weights, layouts.transformer_engine)
    return trained(critic.config, critic, training_shard(critic, rank))


def _away(config: Config, own: Trained, kept: int, leaves: bool, critic: Trained | None) -> dict[str, Owners]:
    """What lies in the host's memory (`host`) and on a drive (`disk`) during a rollout."""
    memory = config.memory
    away: dict[str, Owners] = {"host": {}, "disk": {}, "none": {}}
    if critic is not None:
        away[_place(memory, memory.critic)]["critic"] = critic.total - critic.gradients
    if leaves:
        away[_place(memory, memory.optimizer)] |= {"masters": own.masters, "moments": own.moments}
    if memory.parameters == "offload":
        away[memory.arena]["parameters"] = own.parameters - kept
    if config.algorithm.kl.where != "none":
        away[_place(memory, memory.reference)]["reference"] = own.parameters
    return away


def _place(memory: MemoryConfig, stated: str) -> str:
    """Where an owner goes that leaves: as stated, or to the arena. `none` for one that stays."""
    return memory.arena if stated == "auto" else stated


def _no_cache() -> KvCache:
    return KvCache(token_bytes=0, wanted_tokens=0, tokens=0, sequences=0)
