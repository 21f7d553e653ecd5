"""Rows that several tensor-parallel ranks train as replicas: key and value heads where TP exceeds their number.

Each rank computes the part of their gradient that its own queries cause. Here the parts are added up, so that all
replicas take the same steps and stay equal bit for bit, and what the norm of the gradient counted more than once is
found. Megatron knows no such parameters: to it the rows of each rank are different ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.models.megatron.engine_attention import Replicated


class ReplicatedRows:
    """The replicated rows of a model's parameters (those marked `replicated`, see `EngineAttention`).

    Every rank of the world makes one at the same time, since it makes process groups where there are such rows.

    Args:
        chunks: the model's, wrapped for gradient buffers: each marked parameter has a `main_grad`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        marked = ((p, getattr(p, "replicated", None)) for chunk in chunks for p in chunk.parameters())
        self._rows: list[tuple[Any, Replicated]] = [(p, mark) for p, mark in marked if mark is not None]
        self._group: dist.ProcessGroup | None = None
        copies = self._rows[0][1].copies if self._rows else 1
        if copies > 1:  # replicas are consecutive ranks, everywhere in the world alike
            self._group, _ = dist.new_subgroups(group_size=copies)

    def __bool__(self) -> bool:
        return bool(self._rows)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives each replica the gradient of all. Collective; once an update, when the backward passes are done.

        With a distributed optimizer only a part of `main_grad` is whole on a rank: the same one on all replicas.
        """
        gradients = [parameter.main_grad[mark.first :] for parameter, mark in self._rows]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        sums = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))

    @torch.no_grad()
    def surplus(self, optimizer: Any) -> float:
        """By how much the square of the gradient's norm is too large, as each replica was counted.

        Args:
            optimizer: Megatron's, of the dense parameters, with gradients ready to step.
        """
        group = optimizer.get_grad_stats_parallel_group()
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for gradient, mark in self._owned(optimizer):
            total += gradient.double().square().sum() * (1 - 1 / mark.copies)
        dist.all_reduce(total, group=group)
        return float(total)

    def _owned(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, Replicated]]:
        """The flat part of each parameter's replicated gradient that this rank has counted."""
        for parameter, mark in self._rows:
            flat = parameter.main_grad.view(-1)
            start, stop = 0, flat.numel()
            if optimizer.config.use_distributed_optimizer:
                start, stop = _owned_range(optimizer, parameter)
            first = mark.first * (flat.numel() // parameter.main_grad.shape[0])
            yield flat[max(start, first) : stop], mark


def _owned_range(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Elements of a parameter that this rank of the distributed optimizer steps; none where it owns none of them."""
    place = optimizer.model_param_gbuf_map.get(parameter)
    if place is None:
        return 0, 0
    buffer, dtype, bucket = place
    owned = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
    return owned.start, owned.end
