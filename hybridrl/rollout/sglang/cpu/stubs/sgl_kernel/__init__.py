"""Stands where SGLang's CUDA kernels would be: names of CPU kernels can be imported, and raise when they are called.

SGLang imports them by name on every platform and calls them only on CPUs with AMX. Every other name is absent, so that
SGLang's own checks (`hasattr`, `except ImportError`) turn to its native implementation.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stub of sgl_kernel has no {name}")

    def kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's kernels, which are built for CUDA only")

    kernel.__name__ = name
    return kernel
