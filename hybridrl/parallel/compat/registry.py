"""The list of patches: what each changes in megatron-core, and why it must."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One named change of megatron-core, made in this process only."""

    name: str
    where: str
    """The place in megatron-core (or torch) that is changed."""
    reason: str
    """What fails without it."""
    apply: Callable[[], None]
    general: bool
    """A bug on any device. The others only serve a machine without CUDA, and are left out where there is one."""


PATCHES: dict[str, Patch] = {}
"""By name, in the order of installation."""


def patch(*, where: str, reason: str, general: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a function that makes one change, under the function's name."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        name = function.__name__
        PATCHES[name] = Patch(name=name, where=where, reason=reason, apply=function, general=general)
        return function

    return register
