"""Rows as they stand in files, on a disk's Hugging Face data set, or in a reasoning-gym task."""

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data import builtin, tasks
from hybridrl.data.errors import DataError
from hybridrl.files import cache_folder

_SUFFIXES = {"jsonl": (".jsonl",), "parquet": (".parquet",), "dataset": (".parquet", ".jsonl")}
_SPLIT = re.compile(r"^(train|validation|valid|val|dev|test)(?=[-_.]|$)")


@dataclass(frozen=True)
class Row:
    """One row and where it stands, for errors."""

    where: str
    fields: dict[str, Any]


def load_rows(config: DataConfig, cache: Path | None = None) -> list[Row]:
    """All rows of `data`, in the order of the files' names and of the rows in them. `cache` is for builtin data.

    Raises DataError for an unknown source, a missing, broken or empty file, and a choice of splits left open.
    """
    if config.source == "reasoning_gym":
        return list(_problems(config))
    if config.source not in _SUFFIXES:
        raise DataError(f"data.source={config.source!r}; expected {', '.join(_SUFFIXES)} or reasoning_gym")
    if not config.path:
        raise DataError(f"data.path is not set; data.source={config.source} needs a file, folder or glob")
    path = builtin.resolve(config.path, cache or cache_folder())
    rows = list(_rows(config, Path(path).expanduser()))
    if not rows:
        raise DataError(f"data.path={config.path}: found no rows")
    return rows


def _problems(config: DataConfig) -> Iterator[Row]:
    if not config.task:
        raise DataError("data.task is not set; data.source=reasoning_gym needs the name of a data set, as leg_counting")
    if config.size < 1:
        raise DataError(f"data.size={config.size}; expected at least one problem")
    for index, fields in enumerate(tasks.problems(config.task, config.task_args, config.seed, config.size)):
        yield Row(f"reasoning_gym {config.task}, problem {index}", fields)


def _rows(config: DataConfig, path: Path) -> Iterator[Row]:
    if config.source == "dataset" and _is_saved_dataset(path):
        yield from _saved_dataset(path, config.split)
        return
    for file in _files(config, path):
        try:
            yield from _parquet(file) if _is_parquet(config, file) else _jsonl(file)
        except DataError as error:
            raise DataError(f"data.path={config.path}: {error}") from error


def _is_parquet(config: DataConfig, file: Path) -> bool:
    """By the name's ending, or where that says nothing by the source."""
    known = {suffix for suffixes in _SUFFIXES.values() for suffix in suffixes}
    return file.suffix == ".parquet" or (file.suffix not in known and config.source == "parquet")


def _files(config: DataConfig, path: Path) -> list[Path]:
    suffixes = _SUFFIXES[config.source]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        found = _of_split(config, path, found)
    elif path.is_file():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        saved = "; expected a folder of Dataset.save_to_disk, or of such files" if config.source == "dataset" else ""
        raise DataError(f"data.path={config.path}: found no {' or '.join(suffixes)} file there{saved}")
    if config.source == "dataset" and (other := [file for file in found if file.suffix not in suffixes]):
        raise DataError(f"data.path={config.path}: {other[0]} is neither {' nor '.join(suffixes)}")
    return found


def _of_split(config: DataConfig, folder: Path, files: list[Path]) -> list[Path]:
    """The files of the wanted split, told by their or their folder's name: `train-00000-of-00002.parquet`."""
    splits: dict[Path, str | None] = {}
    for file in files:
        names = [re.match(_SPLIT, part) for part in file.relative_to(folder).parts]
        splits[file] = next((match.group(1) for match in reversed(names) if match), None)
    if config.split is None:
        named = sorted({name for name in splits.values() if name})
        if len(named) > 1:
            raise DataError(f"data.path={config.path} holds the splits {', '.join(named)}; choose by data.split")
        return files
    chosen = [
        file
        for file in files
        if splits[file] == config.split
        or any(re.match(rf"{re.escape(config.split)}([-_.]|$)", part) for part in file.relative_to(folder).parts)
    ]
    if files and not chosen:
        names_found = ", ".join(str(file.relative_to(folder)) for file in files[:10])
        raise DataError(
            f"data.split={config.split}: no file or folder of that name in {config.path}; found {names_found}"
        )
    return chosen


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(f"{file}:{number}: not a line of JSON: {error}") from error
            if not isinstance(fields, dict):
                raise DataError(f"{file}:{number}: expected a JSON object, found {type(fields).__name__}")
            yield Row(f"{file}:{number}", fields)


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        # The handle, not the name: pyarrow would read a folder part `key=value` as a column.
        with file.open("rb") as handle:
            table = pyarrow.parquet.read_table(handle)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a whole Parquet file: {error}") from error
    for index, fields in enumerate(table.to_pylist()):
        yield Row(f"{file}, row {index}", fields)


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_dataset(path: Path, split: str | None) -> Iterator[Row]:
    import datasets

    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            raise DataError(f"data.split={split}: {path} holds the splits {', '.join(data)}; choose one of them")
        data = data[split]
    elif split is not None:
        raise DataError(f"data.split={split}: {path} holds one data set without splits; leave data.split out")
    for index, fields in enumerate(data.with_format(None)):
        yield Row(f"{path}, row {index}", dict(fields))
