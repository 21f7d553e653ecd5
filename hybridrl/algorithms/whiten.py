"""Zero mean and unit deviation over the valid entries of a batch that may be spread over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    sample: bool = True,
    eps: float = 1e-8,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """(values - mean) / deviation over the entries where `mask` holds; 0 elsewhere.

    Args:
        values: any shape, float; masked entries may hold anything, NaN included.
        mask: bool, as `values`.
        sample: deviation over n - 1 entries instead of n.
        group: ranks that hold the rest of the batch; every one of them must call, also with nothing valid.

    Returns float32 of that shape. With no or one valid entry, or all equal, the valid entries are 0.
    """
    kept = torch.where(mask, values, 0).double()
    sums = _total(torch.stack([mask.double().sum(), kept.sum()]), group)
    count, mean = sums[0], sums[1] / sums[0].clamp(min=1)
    centred = torch.where(mask, kept - mean, 0)
    square = _total(centred.square().sum(), group)
    deviation = (square / (count - int(sample)).clamp(min=1)).sqrt()
    return (centred / (deviation + eps)).float()


def _total(value: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
