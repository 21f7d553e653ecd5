"""A recipe's dry run: everything that can be known of it before it starts, and whether it fits."""

from dataclasses import asdict, dataclass

from hybridrl.config.batch import BatchArithmetic, batch_arithmetic
from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.models.weights import WeightMap
from hybridrl.planning.activations import micro_batches
from hybridrl.planning.compute import StepSeconds, step_seconds
from hybridrl.planning.hardware import GIB, Hardware
from hybridrl.planning.layouts import Layouts
from hybridrl.planning.memory import RankMemory, rank_memory
from hybridrl.planning.switches import Reshard, Switch
from hybridrl.planning.work import params_of

MAX_RANKS = 8192
"""The bytes between every two ranks are held: for so many in 9 GB, within a minute."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a configuration will do on its hardware."""

    config: Config
    hardware: Hardware
    layouts: Layouts
    batch: BatchArithmetic
    micro_batches: int
    """Of a data-parallel rank in an update."""
    parameters: tuple[int, int]
    """In all, and met by one token."""
    memory: RankMemory
    """Of the fullest rank."""
    reshard: Reshard | None
    switches: dict[str, Switch]
    """`to_rollout` and `to_training`; empty for supervised training."""
    step: StepSeconds

    @property
    def shortages(self) -> list[str]:
        """Why it does not fit, each with its numbers; empty where it does."""
        hardware, memory, rollout = self.hardware, self.memory, self.config.rollout
        found = [
            f"{phase}: rank {memory.rank} needs {memory.total(phase) / GIB:.1f} GiB of a device, and may use "
            f"{hardware.memory_bytes / GIB:.1f} ({hardware.memory_gib:g} less {hardware.overhead_gib:g})"
            for phase in memory.phases
            if memory.total(phase) > hardware.memory_bytes
        ]
        host = sum(memory.host.values())
        if host > hardware.host_bytes:
            found.append(
                f"host: a rank needs {host / GIB:.1f} GiB of the node's memory, its share is "
                f"{hardware.host_bytes / GIB:.1f}; memory.arena=disk takes a local drive instead"
            )
        if self.reshard is not None and not found and memory.cache.sequences < 1:
            longest = rollout.max_prompt_length + rollout.max_response_length
            found.append(
                f"rollout: {memory.cache.tokens} tokens of KV cache fit beside the weights, a sample may have {longest}"
            )
        if (
            self.reshard is not None
            and not found
            and (asked := rollout.sglang.kv_tokens)
            and memory.cache.tokens < asked
        ):
            found.append(f"rollout: rollout.sglang.kv_tokens={asked}, and {memory.cache.tokens} fit beside the weights")
        return found

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def limit(self) -> str:
        """The phase that takes most of a step, and what bounds it."""
        seconds = asdict(self.step)
        longest = max(seconds, key=lambda name: seconds[name])
        what = {
            "decode": "memory bandwidth and the latency of decode steps",
            "communication": "the links between ranks, in the collectives of training",
            "switches": "the links between ranks, or between device and host",
        }.get(longest, "floating-point operations")
        return f"{longest}: {what}"


def estimate(config: Config, weights: WeightMap, hardware: Hardware, *, cuda: bool = True) -> Estimate:
    """The dry run of a configuration that passed `validate`. Pure; seconds on a laptop.

    `weights` are `planning.layouts.trained_weights`. `cuda` says whether ranks run Transformer Engine's modules.
    Raises ValueError for layouts that make no reshard, and for more than `MAX_RANKS` ranks with rollouts.
    """
    layouts = Layouts(config, weights, cuda)
    if not is_supervised(config) and layouts.world > MAX_RANKS:
        raise ValueError(
            f"trainer.nodes={config.trainer.nodes} · trainer.ranks_per_node={config.trainer.ranks_per_node} = "
            f"{layouts.world:,} ranks: the dry run of a rollout reckons with every pair of ranks, up to {MAX_RANKS:,}; "
            "plan fewer nodes, with as many prompts a node"
        )
    reshard = None if is_supervised(config) else Reshard(config, layouts, hardware)
    ranks = [rank_memory(config, layouts, reshard, hardware, rank) for rank in layouts.stage_ranks()]
    fullest = max(ranks, key=lambda one: one.peak)
    smallest_cache = min((one.cache for one in ranks), key=lambda cache: cache.sequences)
    switches = {} if reshard is None else reshard.switches(fullest.leaving)
    seconds = sum(one.seconds for one in switches.values())
    return Estimate(
        config=config,
        hardware=hardware,
        layouts=layouts,
        batch=batch_arithmetic(config, layouts.world),
        micro_batches=micro_batches(config),
        parameters=params_of(weights),
        memory=fullest,
        reshard=reshard,
        switches=switches,
        step=step_seconds(config, layouts, hardware, smallest_cache if reshard else None, seconds),
    )
