"""Which data-parallel rank takes which rows in which micro-batch. Pure, and made from the whole batch, so that every
rank knows every other's plan and all enter the same collectives equally often.

What always holds:
  - every row is in exactly one micro-batch;
  - no micro-batch exceeds the token budget, padding included, or `max_rows`;
  - all ranks have the same number of micro-batches, a multiple of `count_multiple`; an empty one stands in where a rank
    has fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil


@dataclass(frozen=True)
class Schedule:
    """`micro_batches[rank][step]` holds positions in the list of rows that was scheduled."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def steps(self) -> int:
        """Micro-batches of every rank."""
        return len(self.micro_batches[0])


def schedule(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    packing: bool,
    max_rows: int | None = None,
    pad_multiple: int = 1,
    count_multiple: int = 1,
) -> Schedule:
    """Deals rows of these lengths to data-parallel ranks, evenly in tokens, and cuts each rank's into micro-batches.

    Args:
        lengths: tokens of each row.
        ranks: data-parallel ranks.
        max_tokens: tokens of a micro-batch on one rank, padding included.
        packing: rows lie end to end; otherwise they are padded to the longest.
        max_rows: rows of a micro-batch.
        pad_multiple: tokens of a micro-batch (packed) or of its rows (padded) are padded to a multiple of this.
        count_multiple: the number of micro-batches must divide by this (pipeline stages, where interleaved).

    Raises ValueError naming each row that exceeds the budget alone, and the option.
    """
    cost = _Cost(packing, pad_multiple)
    _check_lengths(lengths, cost, max_tokens)
    shares = _deal(lengths, ranks)
    bins = [_cut(share, lengths, cost, max_tokens, max_rows or len(lengths)) for share in shares]
    steps = max(1, max(map(len, bins)))
    steps = ceil(steps / count_multiple) * count_multiple
    return Schedule(tuple(tuple(b) + ((),) * (steps - len(b)) for b in bins))


@dataclass(frozen=True)
class _Cost:
    """Tokens that a micro-batch occupies, from the sum, the longest and the number of its rows."""

    packing: bool
    multiple: int

    def __call__(self, total: int, longest: int, count: int) -> int:
        return self._pad(total) if self.packing else count * self._pad(longest)

    def _pad(self, tokens: int) -> int:
        return ceil(tokens / self.multiple) * self.multiple


def _check_lengths(lengths: Sequence[int], cost: _Cost, max_tokens: int) -> None:
    padded = [cost(n, n, 1) for n in lengths]
    too_long = [i for i, n in enumerate(padded) if n > max_tokens]
    if too_long:
        listed = ", ".join(f"row {i} has {lengths[i]}" for i in too_long[:8])
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} rows exceed trainer.max_tokens_per_micro_batch={max_tokens} tokens "
            f"(padded to a multiple of {cost.multiple}): {listed}; raise it to {max(padded)} or more, or lower "
            "rollout.max_prompt_length or rollout.max_response_length"
        )


def _deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens (then fewest rows, then lowest)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, rows, rank = loads[0]
        shares[rank].append(i)
        heapreplace(loads, (tokens + lengths[i], rows + 1, rank))
    return shares


def _cut(
    share: Sequence[int], lengths: Sequence[int], cost: _Cost, max_tokens: int, max_rows: int
) -> list[tuple[int, ...]]:
    """First fit, longest first: few bins, the fullest in front, so that ranks are busy alike at each step."""
    bins: list[tuple[list[int], int]] = []
    for i in share:
        for b, (rows, total) in enumerate(bins):
            grown = cost(total + lengths[i], lengths[rows[0]], len(rows) + 1)
            if len(rows) < max_rows and grown <= max_tokens:
                bins[b] = ([*rows, i], total + lengths[i])
                break
        else:
            bins.append(([i], lengths[i]))
    return [tuple(sorted(rows)) for rows, _ in bins]
