"""Rows of a vocabulary over all tensor-parallel ranks: those of the checkpoint, and padding after them. Pure."""

ENGINE_MULTIPLE = 64
"""What inference engines pad a vocabulary to."""


def padded_to_multiple(vocabulary: int, multiple: int, tp: int) -> int:
    """Megatron's rule: rounded up to a multiple of `multiple · tp`."""
    return _round_up(vocabulary, multiple * tp)


def padded_as_engine(vocabulary: int, tp: int) -> int:
    """The engine's rule: a multiple of 64, or of 64 · tp where tp does not divide that evenly."""
    padded = _round_up(vocabulary, ENGINE_MULTIPLE)
    return padded if padded % tp == 0 else _round_up(vocabulary, ENGINE_MULTIPLE * tp)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
