"""What an update of the critic minimises."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.segments import Segments
from hybridrl.algorithms.value_losses import squared_error
from hybridrl.training.losses import Shares


@dataclass(frozen=True, kw_only=True)
class Value:
    """The squared error of values of the policy's own tokens, clipped, as a mean over them."""

    clip: float | None
    aggregate: str = "token_mean"
    aggregate_length: int | None = None
    fields: tuple[str, ...] = ("values", "returns")
    """`values` are those of the critic when the step began."""
    metrics: tuple[str, ...] = ("loss/value", "value/clipped")

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], mask: Tensor, share: float, segments: Segments
    ) -> Shares:
        zero = values.new_zeros(())
        new, old, returns = (torch.where(mask, x, zero) for x in (values, fields["values"], fields["returns"]))
        found = squared_error(new, old, returns, clip=self.clip)
        loss = (torch.where(mask, fields["weights"], zero) * found.loss).sum()
        return loss, {"loss/value": loss.detach(), "value/clipped": share * (found.clipped & mask).sum()}
