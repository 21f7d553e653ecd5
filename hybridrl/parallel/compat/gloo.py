"""Collectives that NCCL takes with pieces of unequal size and gloo does not."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.parallel.compat.registry import patch


@patch(
    where="_gather_along_first_dim and _reduce_scatter_along_first_dim (tensor_parallel/mappings.py)",
    reason="RuntimeError: invalid tensor size, for MoE with EP > 1 and ETP > 1",
)
def uneven_collectives() -> None:
    from megatron.core.tensor_parallel import mappings

    even_gather = mappings._gather_along_first_dim
    even_reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Pads to the longest piece, gathers, cuts the padding off."""
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros((longest, *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        pieces = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, output_split_sizes, strict=True)])

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Sums the whole and keeps this rank's piece."""
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone()
        dist.all_reduce(whole, group=group)
        return torch.split(whole, list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter
