"""The key-value cache of a batch of sequences, each at its own length.

Every sequence has a slot, a row of one buffer a layer, and its token i lies at column i. The live sequences fill the
first slots, so a pass over them attends to views, not copies: where one ends, the last takes its slot (`move`).
Buffers grow by doubling. Transformers' own caches hold sequences of one length, padded on the left, and copy the whole
cache at every token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH_TOKENS = 64  # columns are a multiple of this


class SlotCache:
    """Keys and values of up to `slots` sequences, given to a transformers model in the place of its cache.

    Before a forward pass the caller says where its tokens go (`prefill` or `decode`); the model's layers then call
    `update`. The attention mask must be given to the model, since columns past a sequence's length hold old values.
    Buffers are zeroed when they are made: a masked column adds 0 · value, and a NaN left in memory would survive that.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._first = 0
        self._source: Tensor | None = None
        self._columns: Tensor | None = None
        self._width = 0

    def prefill(self, first: int, source: Sequence[int], width: int, device: torch.device) -> None:
        """The next pass holds prompts in columns [0, width): slot `first + i` takes a copy of its row `source[i]`."""
        self._first = first
        self._source = torch.tensor(source, device=device)
        self._columns, self._width = None, width

    def decode(self, lengths: Tensor, width: int) -> None:
        """The next pass holds one token a sequence: row i goes to slot i, column `lengths[i]`, all below `width`."""
        self._source, self._columns, self._width = None, lengths, width

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values [rows, heads, tokens, head size]; returns those to attend to."""
        buffers = self._reserve(layer, keys, values)
        if self._source is not None:
            rows = slice(self._first, self._first + len(self._source))
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[rows, :, : self._width] = new[self._source]
            return keys, values
        if self._columns is None:
            raise RuntimeError("SlotCache.prefill or SlotCache.decode must be called before a forward pass")
        live = torch.arange(len(self._columns), device=keys.device)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[live, :, self._columns] = new[:, :, 0]
        attended = [buffer[: len(live), :, : self._width] for buffer in buffers]
        return attended[0], attended[1]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies a sequence of `length` tokens from one slot to another."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[destination, :, :length] = buffer[source, :, :length]

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before this pass, for a model that asks; positions and mask are given to it all the same."""
        return 0 if self._columns is None else self._width - 1

    def _reserve(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        have = self._layers.get(layer)
        if have is not None and have[0].shape[2] >= self._width:
            return have
        wanted = max(self._width, 2 * have[0].shape[2] if have else 0)
        wanted = -(-wanted // GROWTH_TOKENS) * GROWTH_TOKENS
        made = []
        for i, new in enumerate((keys, values)):
            buffer = new.new_zeros(self.slots, new.shape[1], wanted, new.shape[3])
            if have is not None:
                buffer[:, :, : have[i].shape[2]] = have[i]
            made.append(buffer)
        self._layers[layer] = (made[0], made[1])
        return self._layers[layer]
