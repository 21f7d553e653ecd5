"""Which rows become examples: those that can be used and are not too long."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from hybridrl.data.errors import DataError
from hybridrl.data.rows import Row

SHOWN = 10
"""Problems that an error lists; the rest are counted."""


class Example(Protocol):
    """Something made of a row."""

    @property
    def token_ids(self) -> Sequence[int]: ...


Made = TypeVar("Made", bound=Example)


def select(
    rows: Iterable[Row], make: Callable[[int, Row], Made], *, what: str, limit: int, option: str, overlong: str
) -> tuple[list[Made], int]:
    """Examples of at most `limit` tokens, in the order of the rows, and how many rows were dropped as longer.

    `make` gets the number of examples so far and a row. Longer ones are dropped (`overlong` is `drop`) or refused
    (`error`). Raises DataError with all rows that `make` or the limit refuses, and if nothing is left.
    """
    if overlong not in ("drop", "error"):
        raise DataError(f"data.overlong={overlong!r}; expected 'drop' or 'error'")
    kept: list[Made] = []
    problems: list[str] = []
    dropped = 0
    for row in rows:
        try:
            example = make(len(kept), row)
        except DataError as error:
            problems.append(f"{row.where}: {error}")
            continue
        length = len(example.token_ids)
        if length <= limit:
            kept.append(example)
        elif overlong == "drop":
            dropped += 1
        else:
            problems.append(
                f"{row.where}: the {what} has {length} tokens, over {option}={limit}; raise it, or set "
                "data.overlong=drop"
            )
    _raise_all(problems)
    if not kept:
        raise DataError(f"no {what} is left: all {dropped} are over {option}={limit} tokens")
    return kept, dropped


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        rest = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError("\n".join([*problems[:SHOWN], *rest]))
