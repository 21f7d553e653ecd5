"""Which positions of a sequence a context-parallel rank holds: Megatron's order, balanced under a causal mask. Pure.

A sequence is cut into 2·CP equal chunks. Rank r holds chunk r and, after it, chunk 2·CP - 1 - r: an early one, whose
positions see little, and a late one, whose positions see much.
"""


def padded_length(length: int, ranks: int) -> int:
    """The least length of at least this that `ranks` context-parallel ranks can share."""
    return -(-length // (2 * ranks)) * 2 * ranks if ranks > 1 else length


def chunks(rank: int, ranks: int) -> tuple[int, ...]:
    """Indices of the chunks that a rank holds, in its order; 0, the one that there is, for a single rank."""
    return (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,)


def spans(length: int, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of positions that a rank holds of a sequence of this length, in its order.

    Raises ValueError where 2·ranks does not divide the length.
    """
    count = 2 * ranks if ranks > 1 else 1
    if length % count:
        raise ValueError(f"a sequence of {length} tokens over {ranks} context-parallel ranks: no multiple of {count}")
    size = length // count
    return tuple((chunk * size, (chunk + 1) * size) for chunk in chunks(rank, ranks))
