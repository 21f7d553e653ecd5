"""Optimizer code that asks a tensor for its type by name, and knows the names of CUDA types only."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch


@contextlib.contextmanager
def _types_named_as_on_cuda() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _types_named_as_on_cuda():
            return function(*args, **kwargs)

    return call


@patch(
    where="DistributedOptimizer.__init__ (optimizer/distrib_optimizer.py)",
    reason="TypeError: Wrapped parameter must be one of torch.cuda.FloatTensor, ...",
)
def types_distributed_optimizer() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.__init__ = _with_cuda_names(DistributedOptimizer.__init__)


@patch(
    where="Float16OptimizerWithFloat16Params.__init__ (optimizer/optimizer.py)",
    reason="TypeError: Wrapped parameter must be one of torch.cuda.FloatTensor, ...",
)
def types_mixed_precision_optimizer() -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    Float16OptimizerWithFloat16Params.__init__ = _with_cuda_names(Float16OptimizerWithFloat16Params.__init__)


@patch(
    where="clip_grad_by_total_norm_fp32 (optimizer/clip_grads.py)",
    reason="AssertionError on param.grad.type()",
)
def types_clip_grads() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    function = _with_cuda_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = function
    optimizer.clip_grad_by_total_norm_fp32 = function
