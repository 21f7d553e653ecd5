"""Which data-parallel rank takes which rows in which micro-batch. Pure, and made from the whole batch, so that every
rank knows every other's plan and all enter the same collectives equally often.

What always holds:
  - every row is in exactly one micro-batch, with the rows that it belongs together with;
  - no micro-batch exceeds the token budget, padding included, or `max_rows`;
  - all ranks have the same number of micro-batches, a multiple of `count_multiple`; an empty one stands in where a rank
    has fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil

from hybridrl.parallel.zigzag import padded_length


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
    together: Sequence[Sequence[int]] | None = None,
    cp: int = 1,
) -> Schedule:
    """Deals rows of these lengths to data-parallel ranks, evenly in tokens, and cuts each rank's into micro-batches.

    Args:
        lengths: tokens of each row.
        ranks: data-parallel ranks.
        max_tokens: tokens of a micro-batch on one rank, padding included; `cp` ranks share a micro-batch of as many.
        packing: rows lie end to end; otherwise they are padded to the longest.
        max_rows: rows of a micro-batch.
        pad_multiple: tokens of a micro-batch (packed) or of its rows (padded) are padded to a multiple of this.
        count_multiple: the number of micro-batches must divide by this (pipeline stages, where interleaved).
        together: rows that share a micro-batch, each row in one of these; None: every row is by itself.
        cp: context-parallel ranks; each row of a pack is padded to a multiple of 2·cp, where there are several.

    Raises ValueError naming each row (or rows that belong together) over the budget or `max_rows`, and the option.
    """
    cost, budget = _Cost(packing, pad_multiple), max_tokens * cp
    units = _units([padded_length(n, cp) for n in lengths] if packing else lengths, together)
    _check_sizes(units, cost, max_tokens, max_rows, cp)
    shares = _deal(units, ranks)
    bins = [_cut(share, cost, budget, max_rows or len(lengths)) for share in shares]
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


@dataclass(frozen=True)
class _Unit:
    """Rows that share a micro-batch; usually one."""

    rows: tuple[int, ...]
    tokens: int
    longest: int

    def __str__(self) -> str:
        return (
            f"row {self.rows[0]} has {self.tokens}" if len(self.rows) == 1 else f"rows {self.rows} have {self.tokens}"
        )


def _units(lengths: Sequence[int], together: Sequence[Sequence[int]] | None) -> list[_Unit]:
    groups = [(i,) for i in range(len(lengths))] if together is None else together
    if sorted(row for group in groups for row in group) != list(range(len(lengths))):
        raise ValueError(f"the groups {groups!r:.200} do not hold each of {len(lengths)} rows once")
    return [_Unit(tuple(g), sum(lengths[i] for i in g), max(lengths[i] for i in g)) for g in groups]


def _check_sizes(units: Sequence[_Unit], cost: _Cost, max_tokens: int, max_rows: int | None, cp: int) -> None:
    many = [unit for unit in units if max_rows is not None and len(unit.rows) > max_rows]
    if many:
        raise ValueError(
            f"trainer.micro_batch_size={max_rows} cannot hold rows {many[0].rows}, which share a micro-batch; raise it "
            f"to {max(len(unit.rows) for unit in many)} or more"
        )
    padded = [cost(unit.tokens, unit.longest, len(unit.rows)) for unit in units]
    too_long = [unit for unit, size in zip(units, padded, strict=True) if size > max_tokens * cp]
    if too_long:
        shared = f" · parallel.cp={cp}" if cp > 1 else ""
        what = "rows" if all(len(unit.rows) == 1 for unit in units) else "groups of rows"
        raise ValueError(
            f"{len(too_long)} of {len(units)} {what} exceed trainer.max_tokens_per_micro_batch={max_tokens}{shared} "
            f"tokens (padded to a multiple of {cost.multiple}): {', '.join(map(str, too_long[:8]))}; raise it to "
            f"{ceil(max(padded) / cp)} or more, or lower rollout.max_prompt_length or rollout.max_response_length"
        )


def _deal(units: Sequence[_Unit], ranks: int) -> list[list[_Unit]]:
    """Longest first, each to the rank with the fewest tokens (then fewest units, then lowest)."""
    shares: list[list[_Unit]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.rows)):
        tokens, count, rank = loads[0]
        shares[rank].append(unit)
        heapreplace(loads, (tokens + unit.tokens, count + 1, rank))
    return shares


def _cut(share: Sequence[_Unit], cost: _Cost, max_tokens: int, max_rows: int) -> list[tuple[int, ...]]:
    """First fit, longest first: few bins, the fullest in front, so that ranks are busy alike at each step."""
    bins: list[_Unit] = []
    for unit in share:
        for b, held in enumerate(bins):
            grown = _Unit(held.rows + unit.rows, held.tokens + unit.tokens, max(held.longest, unit.longest))
            if len(grown.rows) <= max_rows and cost(grown.tokens, grown.longest, len(grown.rows)) <= max_tokens:
                bins[b] = grown
                break
        else:
            bins.append(unit)
    return [tuple(sorted(held.rows)) for held in bins]
