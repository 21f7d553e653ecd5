"""Data sets that are made on first use, of all sums of two digits: `builtin:tiny_sums` with their answers,
`builtin:tiny_pairs` with a right and a wrong one, `builtin:tiny_verdicts` with one and whether it is right."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.data.errors import DataError
from hybridrl.files import file_aside

PREFIX = "builtin:"
REVISION = 1
"""Part of the file's name: counted up whenever what is made changes."""


Made = TypeVar("Made")


def tiny_sums() -> list[dict[str, str]]:
    """`{"prompt": "3+5=", "answer": "8"}` for all pairs of digits, 100 rows."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def tiny_pairs() -> list[dict[str, str]]:
    """`{"prompt": "3+5=", "chosen": "8", "rejected": "9"}` for all pairs of digits, three wrong sums each, 300 rows.

    The order is scattered, so that rows at the end, which may be held out, are like the others.
    """
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str((a + b + off) % 19)}
        for off in (1, 7, 12)
        for a in range(10)
        for b in range(10)
    ]
    return _scattered(rows)


def tiny_verdicts() -> list[dict[str, str | bool]]:
    """`{"prompt": "3+5=", "completion": "8", "label": true}`: each sum once right and once wrong, 200 rows."""
    rows: list[dict[str, str | bool]] = [
        {"prompt": f"{a}+{b}=", "completion": str((a + b + off) % 19), "label": off == 0}
        for off in (0, 7)
        for a in range(10)
        for b in range(10)
    ]
    return _scattered(rows)


def _scattered(rows: list[Made]) -> list[Made]:
    """The rows in a fixed order that mixes them: 89 divides no length here, so each comes once."""
    return [rows[i * 89 % len(rows)] for i in range(len(rows))]


_MAKERS: Mapping[str, Callable[[], Sequence[Mapping[str, Any]]]] = {
    "tiny_sums": tiny_sums,
    "tiny_pairs": tiny_pairs,
    "tiny_verdicts": tiny_verdicts,
}


def resolve(path: str, cache: Path) -> str:
    """`path` itself, or for `builtin:<name>` a JSONL file under `cache`, made if it is not there.

    Several processes may ask at once: each writes aside and renames, and all write the same bytes.
    Raises DataError for an unknown name.
    """
    if not path.startswith(PREFIX):
        return path
    name = path.removeprefix(PREFIX)
    if name not in _MAKERS:
        raise DataError(f"data.path={path}: no such builtin data set; there are {', '.join(_MAKERS)}")
    file = cache / f"{name}-{REVISION}.jsonl"
    if not file.is_file():
        with file_aside(file) as aside:
            aside.write_text("".join(json.dumps(row) + "\n" for row in _MAKERS[name]()), encoding="utf-8")
    return str(file)
