"""Modules of Megatron that write `device="cuda"` out."""

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch

MODULES = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
FACTORIES = ("empty", "ones", "tensor", "zeros")


class _TorchOnCpu(types.ModuleType):
    """What those modules find under the name `torch`: torch itself, with `device="cuda"` read as the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # there is no pinned memory without CUDA
        return factory(*args, **kwargs)

    return make


@patch(
    where='device="cuda" literals, e.g. total_num_tokens in pipeline_parallel/schedules.py, the norm in clip_grads.py',
    reason="AssertionError: Torch not compiled with CUDA enabled",
)
def device_literals() -> None:
    for name in MODULES:
        importlib.import_module(name).torch = _TorchOnCpu()  # type: ignore[attr-defined]
