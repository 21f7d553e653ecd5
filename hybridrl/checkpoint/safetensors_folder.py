"""Reading the safetensors of a Hugging Face folder, one file or an indexed set: headers first, bytes on demand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hybridrl.models.weights import Box

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
"""Names of dtypes in a file's header, and torch's."""


class Stored(NamedTuple):
    """A tensor of a file as its header describes it; the dtype as torch names it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFolder:
    """The tensors of a folder. Files stay mapped while this object lives; only what is read is paged in.

    `tensors` describes those found, `problems` says what is wrong with the files and their index (a missing or broken
    file, a name in the index but not in its file, or the reverse).
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.problems: list[str] = []
        self.tensors: dict[str, Stored] = {}
        self._files: dict[str, Any] = {}
        placed = self._index()
        for file in sorted(set(placed.values())):
            self._read_header(file, {name for name, where in placed.items() if where == file})

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The tensor, or only a box of it, in the file's dtype."""
        view = self._files[self.tensors[name].file].get_slice(name)
        value: torch.Tensor = view[:] if box is None else view[tuple(map(slice, box.start, box.stop))]
        return value

    def _index(self) -> Mapping[str, str]:
        """Names by file; one without names stands for a single file, whose header tells them."""
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.is_file() and index.is_file():
            self.problems.append(f"{self.folder} has both {SINGLE_FILE} and {INDEX_FILE}: remove the stale one")
        elif index.is_file():
            return self._read_index(index)
        elif single.is_file():
            return {"": SINGLE_FILE}
        else:
            self.problems.append(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: convert its weights to safetensors"
            )
        return {}

    def _read_index(self, index: Path) -> Mapping[str, str]:
        try:
            placed: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return dict(placed)
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.problems.append(f"{index} cannot be read: {type(error).__name__}: {error}")
            return {}

    def _read_header(self, file: str, indexed: set[str]) -> None:
        try:
            opened = safe_open(self.folder / file, framework="pt")
            names = set(opened.keys())
        except (OSError, SafetensorError) as error:
            self.problems.append(f"{self.folder / file} cannot be read: {error}")
            return
        self._files[file] = opened
        if file != SINGLE_FILE:
            self.problems += [f"{name} is in the index, but not in {file}" for name in sorted(indexed - names)]
            self.problems += [f"{name} is in {file}, but not in the index" for name in sorted(names - indexed)]
        for name in names:
            view = opened.get_slice(name)
            dtype = view.get_dtype()
            self.tensors[name] = Stored(file, tuple(view.get_shape()), DTYPES.get(dtype, dtype))
