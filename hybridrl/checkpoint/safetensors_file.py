"""Writing one safetensors file tensor by tensor, without ever holding its content: the header follows from shapes.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, then the bytes end to end).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from hybridrl.checkpoint.safetensors_folder import DTYPES
from hybridrl.models.weights import ITEM_BYTES, Param

CODES = {name: code for code, name in DTYPES.items()}
HEADER_ALIGNMENT = 8


class SafetensorsFile:
    """A context manager that makes the file; `write` takes its tensors in any order.

    Wider dtypes come first in the file, so that each tensor is aligned to its items. Leaving the context without an
    error syncs the file to disk; raises ValueError there where a tensor was not written.
    """

    def __init__(self, path: Path, tensors: Sequence[Param]) -> None:
        self.path = path
        self._tensors: Mapping[str, Param] = {t.name: t for t in tensors}
        self._starts: dict[str, int] = {}
        self._missing = set(self._tensors)
        self._file: BinaryIO | None = None

    def __enter__(self) -> "SafetensorsFile":
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in sorted(self._tensors.values(), key=lambda t: -ITEM_BYTES[t.dtype]):
            self._starts[tensor.name] = end
            end += tensor.nbytes
            offsets = [self._starts[tensor.name], end]
            entries[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % HEADER_ALIGNMENT)
        self._data = 8 + len(header)
        self._file = self.path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.truncate(self._data + end)  # fails now rather than at the end where a quota forbids the size
        return self

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes a tensor's bytes. Raises ValueError where it is not what the header says, OSError from the file."""
        expected, found = self._tensors[name], (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if found != (expected.shape, expected.dtype):
            raise ValueError(f"{self.path}: {name} is {found}, the header says {(expected.shape, expected.dtype)}")
        assert self._file is not None
        self._file.seek(self._data + self._starts[name])
        self._file.write(value.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B"))
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        with self._file as file:
            if kind is None and not self._missing:
                file.flush()
                os.fsync(file.fileno())
        if kind is None and self._missing:
            raise ValueError(
                f"{self.path}: {len(self._missing)} tensors were never written, {min(self._missing)} first"
            )
