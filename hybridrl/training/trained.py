"""The trained tokens of a batch of rows, end to end: for numbers that need the whole batch at once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.segments import Segments
from hybridrl.training.rows import Row


class Trained:
    """t trained tokens of n rows, in the order of the rows. On the CPU, alike on all ranks."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.lengths = torch.tensor([row.trained for row in rows], dtype=torch.long)
        """[n] int64: trained tokens of each row."""
        self.segments = Segments(torch.repeat_interleave(torch.arange(len(rows)), self.lengths), len(rows))
        """Each token's row."""

    def values(self, field: str) -> Tensor:
        """[t] float64. Raises KeyError if a row lacks the field."""
        parts = [row.fields[field][row.mask] for row in self._rows]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])).double()

    @property
    def padded_mask(self) -> Tensor:
        """[n, longest] bool: where `pad` puts tokens. Indexing by it is the way back to [t]."""
        width = max([1, *self.lengths.tolist()])
        return torch.arange(width) < self.lengths[:, None]

    def pad(self, values: Tensor) -> Tensor:
        """[t] → [n, longest]: each row's trained tokens side by side, 0 behind them."""
        mask = self.padded_mask
        padded = values.new_zeros(mask.shape)
        padded[mask] = values
        return padded

    def write(self, **fields: Tensor) -> list[Row]:
        """The rows with further fields, given as [t]; 0 on tokens that are not trained."""
        starts = [0, *self.lengths.cumsum(0).tolist()]
        rows = []
        arrays = {name: values.float().numpy() for name, values in fields.items()}
        for row, (a, b) in zip(self._rows, pairwise(starts), strict=True):
            whole = {name: np.zeros(len(row), np.float32) for name in arrays}
            for name, values in arrays.items():
                whole[name][row.mask] = values[a:b]
            rows.append(row.with_fields(**whole))
        return rows
