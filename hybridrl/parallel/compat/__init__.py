"""Real, unmodified megatron-core on a machine without CUDA: named patches over its CUDA literals, and two bug fixes.

Import this package before `megatron.core`: on a CPU Megatron's `torch.compile` decorators must be off before they run
(the inductor needs a C++ compiler, and compiling costs more than it saves). `install()` then makes the changes. Where
CUDA is present only the patches marked `general` are made.

Not covered, since nothing here uses it on a CPU: CUDA graphs, FP8, Megatron's own offloading, inference engine and
resharding, FSDP, overlapped communication on side streams.
"""

import os
import sys
from collections.abc import Collection
from importlib.metadata import version

import torch

from hybridrl.parallel.compat import bugs, cuda_calls, cuda_types, gloo, literals, quiet, rng, streams
from hybridrl.parallel.compat.registry import PATCHES, Patch

__all__ = ["PATCHES", "SUPPORTED_VERSIONS", "Patch", "install", "installed", "prepare"]

SUPPORTED_VERSIONS = ("0.16.",)
"""Prefixes of the megatron-core versions that the patches were written and tested for."""

_MODULES = (bugs, cuda_calls, cuda_types, gloo, literals, rng, streams)  # importing them fills PATCHES
_installed: set[str] = set()


def prepare() -> None:
    """Turns `torch.compile`, and warnings that are no news (`quiet`), off where there is no CUDA.

    Must come before the first import of megatron-core. Raises ImportError where it comes too late.
    """
    if torch.cuda.is_available():
        return
    quiet.silence()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return
    if "megatron.core.jit" in sys.modules:
        raise ImportError(
            "megatron.core was imported before hybridrl.parallel.compat, so its functions would be compiled by the "
            "inductor on this CPU: import hybridrl.parallel.compat first, or set TORCHDYNAMO_DISABLE=1"
        )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def install(skip: Collection[str] = ()) -> None:
    """Makes the patches that this machine needs, each once, however often it is called.

    `skip` leaves patches out by name; it serves the tests that a patch is still needed. Raises RuntimeError for a
    version of megatron-core that the patches were not tested with.
    """
    found = version("megatron-core")
    if not found.startswith(SUPPORTED_VERSIONS):
        raise RuntimeError(
            f"megatron-core {found} is installed, and the patches in hybridrl.parallel.compat are tested with "
            f"{' or '.join(prefix + 'x' for prefix in SUPPORTED_VERSIONS)}: install one of these"
        )
    on_cpu = not torch.cuda.is_available()
    for name, patch in PATCHES.items():
        if name not in _installed and name not in skip and (on_cpu or patch.general):
            patch.apply()
            _installed.add(name)


def installed() -> frozenset[str]:
    """Names of the patches made so far in this process."""
    return frozenset(_installed)


prepare()
