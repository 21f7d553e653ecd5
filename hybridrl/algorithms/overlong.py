"""A reward for keeping to a length."""

from torch import Tensor


def soft_punishment(lengths: Tensor, *, max_length: int, cache: int, factor: float = 1.0) -> Tensor:
    """0 up to max_length - cache tokens, then falling in a line to -factor at max_length, and -factor beyond.

    Source: DAPO (Yu et al. 2025), eq. 13 (L_max and L_cache; factor 1).

    Args:
        lengths: [n] tokens of each response.
        cache: 1 to max_length.

    Returns [n] float64. Raises ValueError for a cache outside its range.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"algorithm.overlong.cache={cache} must be from 1 to the maximal length of {max_length}")
    over = lengths.double() - (max_length - cache)
    return -factor * (over / cache).clamp(0, 1)
