"""What stays on the device and what leaves it, decided once, from numbers. Pure."""

from dataclasses import dataclass

from hybridrl.config.sections.memory import MemoryConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one rank."""

    parameters: int
    """The training copy; what the engine shares with it counts here."""
    engine: int
    """The engine's own weights."""
    cache: int
    """Its KV cache."""
    staging: int = 0
    optimizer: int = 0
    reference: int = 0
    critic: int = 0

    @property
    def rollout(self) -> int:
        """What a rollout needs at the least."""
        return self.parameters + self.engine + self.cache + self.staging


@dataclass(frozen=True)
class Places:
    """Where each owner is while it is not needed: `host`, `disk`, or `none` for the device."""

    optimizer: str
    reference: str
    critic: str


def choose(memory: MemoryConfig, sizes: Sizes, *, device: str, device_bytes: int | None) -> Places:
    """The places that `memory` names, with `auto` decided: what fits beside the rollout stays on the device.

    The reference stays first, since it would come and go in every step, then the critic, then the optimizer.

    Args:
        device: `cpu` or `cuda`.
        device_bytes: of the GPU; `memory.device_bytes` takes its place. With neither everything stays: a CPU's memory
            is the host's, and nothing is won by moving within it.
    """
    limit = memory.device_bytes if memory.device_bytes is not None else device_bytes
    left = None if limit is None else limit - memory.margin_bytes - sizes.rollout
    found: dict[str, str] = {}
    for owner in ("reference", "critic", "optimizer"):
        place, size = getattr(memory, owner), getattr(sizes, owner)
        if place == "auto":
            if left is None:
                place = "disk" if memory.arena == "disk" and device == "cpu" else "none"
            else:
                place = "none" if size <= left else memory.arena
        if place == "none" and left is not None:
            left -= size
        found[owner] = place
    return Places(**found)


def cache_room(memory: MemoryConfig, resident: int, device_bytes: int | None) -> int | None:
    """Bytes for the KV cache beside `resident` ones of a rollout; None where nothing limits it."""
    limit = memory.device_bytes if memory.device_bytes is not None else device_bytes
    return None if limit is None else max(0, limit - memory.margin_bytes - resident)
