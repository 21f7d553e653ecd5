"""What makes a checkpoint whole: a manifest with the size and digest of each of its files, written last."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
FORMAT = 1
PREFIX = "step-"
LARGE = 2**20
"""Bytes from which on a thread is worth its while."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or what was written cannot be read."""


@dataclass(frozen=True)
class Written:
    """A file as it was written."""

    size: int
    digest: str
    """SHA-256, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    world: int
    """Ranks that wrote it."""
    metric: float | None = None
    """Of its step, by `checkpoint.best_metric`; None where there was none, or it was not finite."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: `kinds` of tensors of its optimizer, and the `step` that this has made."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the software that wrote it."""
    files: Mapping[str, Written] = field(default_factory=dict)


def folder_of(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"{PREFIX}{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder by its name; None for other names."""
    digits = folder.name.removeprefix(PREFIX)
    return int(digits) if folder.name.startswith(PREFIX) and digits.isdecimal() else None


def checkpoints(parent: Path) -> list[Path]:
    """Folders with a checkpoint's name, in the order of their steps; whole or not."""
    found = [path for path in parent.iterdir() if step_of(path) is not None] if parent.is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=lambda path: step_of(path) or 0)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it with a digest of its own, synced to disk."""
    content = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError for a folder without a manifest that is whole and of this format."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = content.pop("digest")
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if digest != _digest(content):
        raise CheckpointError(f"{folder / MANIFEST} is not what was written: its digest differs")
    if (found := content.pop("format")) != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is of format {found}; this version reads format {FORMAT}")
    files = {name: Written(**entry) for name, entry in content.pop("files").items()}
    return Manifest(**content, files=files)


def file_problems(folder: Path, files: Mapping[str, Written], names: Iterable[str]) -> list[str]:
    """What is wrong with these of a checkpoint's files: missing, of another size, or of other bytes."""
    return [problem for name in names if (problem := _problem(folder / name, files[name])) is not None]


def _problem(path: Path, expected: Written) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path} has {size} bytes, {expected.size} were written"
        if digest_of(path) != expected.digest:
            return f"{path} does not hold the bytes that were written: its SHA-256 differs"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashingFile:
    """A file that is written from its start to its end, whose size and digest are known afterwards.

    Large pieces are digested in a thread of their own while they are written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha = hashlib.sha256()
        self._size = 0
        self._beside = ThreadPoolExecutor(1)
        self.failed: OSError | None = None
        """Why the last write did not succeed."""

    def write(self, data: Any) -> int:
        """Appends bytes, or anything that exposes them. Raises OSError."""
        count = memoryview(data).nbytes
        digested = self._beside.submit(self._sha.update, data) if count >= LARGE else None
        try:
            self._file.write(data)
        except OSError as error:
            self.failed = error
            raise
        finally:
            if digested is not None:
                digested.result()  # the caller may change the data then
        if digested is None:
            self._sha.update(data)
        self._size += count
        return count

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    @property
    def written(self) -> Written:
        return Written(self._size, self._sha.hexdigest())

    def close(self) -> None:
        """Syncs to disk and closes."""
        self._beside.shutdown()
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
