"""Parameters that two processes hold at once: the engine's scheduler lays them out, the trainer's rank maps them.

On a CPU they lie in one file of shared memory, which both map and which is removed once they have. On a GPU the
allocation stays the engine's, and the trainer opens it through CUDA's inter-process handles.
"""

import mmap
import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
INDEX, DATA = "index", "data"


def share(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Puts parameters where another process can map them, and writes into `folder` how. Their values are zeroed.

    On a CPU `param.data` is re-pointed to the shared memory; on a GPU it stays where it is.
    """
    tensors = {name: parameter.data for name, parameter in parameters.items()}
    if all(tensor.is_cuda for tensor in tensors.values()):
        from torch.multiprocessing.reductions import reduce_tensor

        for tensor in tensors.values():
            tensor.zero_()
        torch.cuda.synchronize()
        _write(folder, {name: reduce_tensor(tensor) for name, tensor in tensors.items()})
        return
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    with (folder / DATA).open("wb") as file:
        file.truncate(max(end, ALIGNMENT))
    for name, tensor in _map(folder, entries).items():
        parameters[name].data = tensor
    _write(folder, entries)


def attach(folder: Path) -> dict[str, Tensor]:
    """The parameters that `share` laid out: the same memory. `folder` may be removed afterwards."""
    content: dict[str, Any] = pickle.loads((folder / INDEX).read_bytes())
    if (folder / DATA).exists():
        return _map(folder, content)
    return {name: rebuild(*args) for name, (rebuild, args) in content.items()}


def _map(folder: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> dict[str, Tensor]:
    with (folder / DATA).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    found = {}
    for name, (dtype, shape, start) in entries.items():
        kind: torch.dtype = getattr(torch, dtype)
        found[name] = whole[start : start + prod(shape) * kind.itemsize].view(kind).view(shape)
    return found


def _write(folder: Path, content: Any) -> None:
    """Whole or not at all."""
    aside = folder / f"{INDEX}.part"
    aside.write_bytes(pickle.dumps(content))
    aside.rename(folder / INDEX)
