"""A micro-batch under context parallelism: each rank computes some positions of every sequence, and the results of all
of them come back to each.

Losses then see whole sequences, alike on all ranks of a context-parallel group. A rank keeps the gradient of its own
positions; what these owe to keys and values of other ranks' tokens goes through the attention.
"""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from hybridrl.parallel.groups import Groups
from hybridrl.parallel.zigzag import spans


class Share:
    """The positions of one micro-batch that this rank computes.

    Args:
        lengths: of the sequences that lie end to end in a row, or the one width of padded rows; 2·CP divides each.
        groups: of the training world.
        device: of the micro-batch.
    """

    def __init__(self, lengths: Sequence[int], groups: Groups, device: torch.device) -> None:
        self._group, ranks = groups.cp, groups.sizes.cp
        by_rank = [positions(lengths, rank, ranks) for rank in range(ranks)]
        self._own = torch.tensor(by_rank[groups.coordinates.cp], device=device)
        self._order = torch.tensor([p for own in by_rank for p in own], device=device).argsort()

    def cut(self, values: Tensor) -> Tensor:
        """[b, s] → [b, s / CP]: this rank's positions, in its order."""
        return values.index_select(1, self._own)

    def gather(self, *values: Tensor) -> tuple[Tensor, ...]:
        """[b, s / CP] each, of this rank's positions → [b, s] each, of all. Collective; differentiable."""
        local = torch.stack(values, dim=-1).transpose(0, 1).contiguous()
        # Every rank makes the same loss of all values, so each keeps the gradient of its own, unsummed.
        whole = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=False, group=self._group)
        return tuple(whole.index_select(0, self._order).transpose(0, 1).unbind(-1))


def positions(lengths: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Positions in the row that a context-parallel rank holds, in its order: its chunks of each sequence in turn."""
    found: list[int] = []
    first = 0
    for length in lengths:
        for start, stop in spans(length, rank, ranks):
            found += range(first + start, first + stop)
        first += length
    return found
