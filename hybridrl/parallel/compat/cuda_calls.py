"""Functions of `torch.cuda` that Megatron calls without asking whether there is a GPU."""

from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch


@patch(
    where="torch.cuda.current_device, the device of almost every tensor that Megatron makes",
    reason="AssertionError: Torch not compiled with CUDA enabled",
)
def current_device() -> None:
    def cpu() -> Any:
        return torch.device("cpu")

    torch.cuda.current_device = cpu


@patch(
    where="torch.cuda.synchronize, after pipeline communication (pipeline_parallel/p2p_communication.py)",
    reason="AssertionError: Torch not compiled with CUDA enabled",
)
def synchronize() -> None:
    torch.cuda.synchronize = lambda device=None: None


@patch(
    where="Tensor.cuda(), on the tied embedding's copy (models/common/language_module) and in optimizer checkpoints",
    reason="AssertionError: Torch not compiled with CUDA enabled",
)
def tensor_cuda() -> None:
    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign, assignment]
