"""A child that does not outlive its parent, in an environment of its own. Imports nothing heavy."""

import ctypes
import os
import signal
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "OMPI_", "SLURM_")
LAUNCHER_NAMES = frozenset({"RANK", "WORLD_SIZE"})


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what tells a process that it is a rank: SGLang's processes make a world of their own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }


def die_with(parent: int) -> None:
    """Has the kernel kill this process as soon as the process `parent`, which started it, ends in whatever way.

    Raises OSError where the kernel refuses, ProcessLookupError if the parent has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise ProcessLookupError(f"the parent {parent} ended while this process started")
