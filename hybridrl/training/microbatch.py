"""Rows → the tensors of a micro-batch, and results of tokens → rows.

A model's output at position j is about token j + 1. The shift is made here and nowhere else: labels, mask and fields at
position j of a micro-batch are those of the row's token j + 1, and the last position of a row has none, so nothing
leaks from a row into the next one of a pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.segments import Segments
from hybridrl.parallel.zigzag import padded_length
from hybridrl.training.rows import Floats, Row


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """b × s positions. Packed: b = 1, and the rows lie end to end. Padded: one row each, padding on the right."""

    tokens: Tensor
    """[b, s] int64."""
    position_ids: Tensor
    """[b, s] int64, from 0 in every row."""
    labels: Tensor
    """[b, s] int64: the token that the position predicts; 0 where there is none."""
    mask: Tensor
    """[b, s] bool: whether that token is trained."""
    padding: Tensor
    """[b, s] bool: whether the position itself is padding."""
    fields: dict[str, Tensor]
    """[b, s] float32, of that token; 0 where there is none."""
    segments: Segments
    """The row of each position, counted in the order of `rows`."""
    lengths: tuple[int, ...] | None
    """Packed: lengths of the sequences in the pack, padding and a closing one of it included. Padded: None."""
    starts: tuple[tuple[int, int], ...]
    """(b, s) of each row's first token."""
    rows: tuple[int, ...]
    """Position of each row in the list that was scheduled."""
    row_lengths: tuple[int, ...]

    def split(self, values: Tensor) -> "list[tuple[int, Floats]]":
        """Results [b, s] of positions → (position in the list, [length] float32 of tokens) of each row.

        Entry 0 of a row, which nothing predicts, is 0.
        """
        array = values.detach().float().cpu().numpy()
        found = []
        for row, (b, s), length in zip(self.rows, self.starts, self.row_lengths, strict=True):
            out = np.zeros(length, np.float32)
            out[1:] = array[b, s : s + length - 1]
            found.append((row, out))
        return found


def make_micro_batch(
    rows: Sequence[Row],
    indices: Sequence[int],
    fields: Sequence[str],
    *,
    packing: bool,
    pad_multiple: int = 1,
    cp: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """The micro-batch of `rows[i] for i in indices`; with none, `pad_multiple` padding tokens that train nothing.

    It is the whole one, of which each of `cp` context-parallel ranks computes a share: in a pack each row is padded,
    so that they can share it.
    Raises KeyError naming the row and the field if a row lacks one of `fields`.
    """
    chosen = [rows[i] for i in indices]
    missing = {name for row in chosen for name in fields if name not in row.fields}
    if missing:
        raise KeyError(f"rows lack {sorted(missing)}, which the loss needs; they have {sorted(chosen[0].fields)}")
    lengths = [len(row) for row in chosen]
    used = [padded_length(n, cp) for n in lengths] if packing else lengths
    shape = micro_batch_shape(used, packing=packing, pad_multiple=pad_multiple)
    starts, pack = _place(used, packing, shape[1])
    tokens, position_ids, labels = (np.zeros(shape, np.int64) for _ in range(3))
    mask, padding = np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
    owners = np.full(shape, len(chosen), np.int64)
    extra = {name: np.zeros(shape, np.float32) for name in fields}
    for place, (row, (b, s)) in enumerate(zip(chosen, starts, strict=True)):
        n = len(row)
        owners[b, s : s + n] = place
        tokens[b, s : s + n] = row.token_ids
        padding[b, s : s + n] = False
        position_ids[b, s : s + n] = np.arange(n)
        labels[b, s : s + n - 1] = row.token_ids[1:]
        mask[b, s : s + n - 1] = row.mask[1:]
        for name in fields:
            extra[name][b, s : s + n - 1] = row.fields[name][1:]
    _count_on(position_ids, pack)
    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        labels=torch.from_numpy(labels).to(device),
        mask=torch.from_numpy(mask).to(device),
        padding=torch.from_numpy(padding).to(device),
        fields={name: torch.from_numpy(array).to(device) for name, array in extra.items()},
        segments=Segments(torch.from_numpy(owners).to(device), len(chosen)),
        lengths=pack,
        starts=starts,
        rows=tuple(indices),
        row_lengths=tuple(lengths),
    )


def micro_batch_shape(lengths: Sequence[int], *, packing: bool, pad_multiple: int = 1) -> tuple[int, int]:
    """(b, s) of a micro-batch of rows of these lengths, padding included."""
    used = sum(lengths) if packing else max(lengths, default=0)
    width = max(ceil(used / pad_multiple), 1) * pad_multiple
    return (1 if packing else max(len(lengths), 1)), width


def _place(
    lengths: Sequence[int], packing: bool, width: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...] | None]:
    """(b, s) of each row, and the lengths of the pack's sequences (None where padded)."""
    if not packing:
        return tuple((b, 0) for b in range(len(lengths))), None
    stops = tuple(accumulate(lengths, initial=0))
    padding = width - stops[-1]
    return tuple((0, stop) for stop in stops[:-1]), tuple(lengths) + ((padding,) if padding else ())


def _count_on(position_ids: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", pack: tuple[int, ...] | None) -> None:
    """Padding counts on from where it starts: in a pack that which closes it is a sequence of its own."""
    if pack is None:
        position_ids[:] = np.arange(position_ids.shape[1])
    else:
        position_ids[0] = np.concatenate([np.arange(length) for length in pack])
