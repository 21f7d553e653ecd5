"""Which response each position of a micro-batch belongs to, and sums and means over responses."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Positions → responses. Every response is whole: a micro-batch holds all of its tokens."""

    ids: Tensor
    """int64, any shape: the position's response, 0 to count - 1; `count` where there is none (padding)."""
    count: int

    def total(self, values: Tensor) -> Tensor:
        """[count] in the dtype of `values`, summed in float64: values (shaped as `ids`) by response. Differentiable."""
        sums = torch.zeros(self.count + 1, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.ids.flatten(), values.flatten().double())[:-1].to(values.dtype)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[count] mean of `values` by response, over the positions where `mask` holds; 0 for a response without any."""
        kept = torch.where(mask, values, values.new_zeros(()))
        return self.total(kept) / self.total(mask.to(values.dtype)).clamp(min=1)

    def spread(self, by_response: Tensor) -> Tensor:
        """Shaped as `ids`: each position's entry of [count]; 0 where there is no response."""
        return torch.cat([by_response, by_response.new_zeros(1)])[self.ids]
