"""Data sets that are made on first use: `builtin:tiny_sums`, all sums of two digits."""

import json
from pathlib import Path

from hybridrl.data.errors import DataError
from hybridrl.files import file_aside

PREFIX = "builtin:"
REVISION = 1
"""Part of the file's name: counted up whenever what is made changes."""


def tiny_sums() -> list[dict[str, str]]:
    """`{"prompt": "3+5=", "answer": "8"}` for all pairs of digits, 100 rows."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


_MAKERS = {"tiny_sums": tiny_sums}


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
