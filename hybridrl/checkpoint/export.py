"""From a checkpoint of any layout to a Hugging Face folder, in one process that holds one tensor at a time:

python -m hybridrl.checkpoint.export outputs/run/checkpoints/step-00000100 model-at-100 --source path/to/its/model
"""

import argparse
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hybridrl.checkpoint.huggingface_export import MAX_SHARD_BYTES, SOURCE, export_weights
from hybridrl.checkpoint.manifest import CheckpointError, checkpoints, file_problems, read_manifest, step_of
from hybridrl.checkpoint.shards import WEIGHT
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import load_spec, trained_spec, weight_map, with_scalar_head
from hybridrl.models.weights import Box, Param, WeightMap
from hybridrl.reshard.golden_checks import WeightError, dtype_name
from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """The whole weights of a model in a checkpoint, by their Hugging Face names; each is read when it is asked for."""

    def __init__(self, folder: Path, model: str = "policy") -> None:
        self._folder, self._prefix = folder, f"{model}.{WEIGHT}."
        self._metadata = FileSystemReader(folder).read_metadata()
        self._entries = {
            key.removeprefix(self._prefix): entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if key.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def described(self, name: str) -> Param:
        """Its name, shape and dtype, without reading it."""
        entry = self._entries[name]
        return Param(name, tuple(entry.size), dtype_name(entry.properties.dtype))

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            where = self._metadata.storage_data[MetadataIndex(self._prefix + name, chunk.offsets)]
            box = Box(tuple(chunk.offsets), tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=True))))
            whole[tuple(map(slice, box.start, box.stop))] = self._read(where)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # a Mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _read(self, where: Any) -> torch.Tensor:
        """What was written as one piece: a file, an offset and a length."""
        with (self._folder / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            found: torch.Tensor = torch.load(io.BytesIO(file.read(where.length)), weights_only=True)
        return found


class _AsStored(HuggingFaceLayout):
    """Whole tensors, in the dtypes that the checkpoint holds."""

    tensors: CheckpointTensors

    def params(self, rank: int) -> Mapping[str, Param]:
        return {name: self.tensors.described(name) for name in self.tensors}


def export_checkpoint(
    folder: Path, out: Path, source: Path, *, dtype: str | None = SOURCE, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the policy's weights of a checkpoint that is whole; `source` is the folder that the model came from.

    Raises CheckpointError where the checkpoint is not whole, WeightError as `export_weights` does.
    """
    manifest = read_manifest(folder)
    if problems := file_problems(folder, manifest.files, manifest.files):
        raise CheckpointError(f"{folder} is not whole: {'; '.join(problems)}")
    tensors = CheckpointTensors(folder)
    weights = _weights(tensors, source)
    if differing := _differences(tensors, weights):
        raise WeightError(f"{folder} is not of the model of {source}", differing)
    layout = _AsStored(weights, [0])
    layout.tensors = tensors
    export_weights(out, layout, tensors, 0, source=source, dtype=dtype, max_shard_bytes=max_shard_bytes)


def _weights(tensors: CheckpointTensors, source: Path) -> WeightMap:
    """The model of which the checkpoint holds all tensors: its source's, or that as a run trains it, without prediction
    layers and perhaps with a scalar head. The source's where none is, so that every difference is told."""
    trained = trained_spec(source)
    found = [weight_map(spec) for spec in (load_spec(source), trained, with_scalar_head(trained))]
    return next((one for one in found if {t.name for t in one} == set(tensors)), found[0])


def _differences(tensors: CheckpointTensors, weights: WeightMap) -> list[str]:
    """Tensors that only one of the checkpoint and the model has, or that have another shape there."""
    names = {t.name for t in weights}
    found = [f"tensor {t.name} is not in the checkpoint" for t in weights if t.name not in tensors]
    found += [f"tensor {name} is in the checkpoint only" for name in tensors if name not in names]
    saved = {t.name: tensors.described(t.name).shape for t in weights if t.name in tensors}
    return found + [
        f"tensor {t.name} has shape {list(saved[t.name])} in the checkpoint, {list(t.shape)} in the model"
        for t in weights
        if saved.get(t.name, t.shape) != t.shape
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.checkpoint.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder step-…, or a folder of them: the newest is taken")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--source", required=True, help="model.path of the run: configuration and tokenizer")
    dtypes = (SOURCE, "float32", "bfloat16")
    parser.add_argument("--dtype", default=SOURCE, choices=dtypes, help="of the files; source: as the model's")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="size of one file, a tensor at least"
    )
    given = parser.parse_args(arguments)
    if given.max_shard_bytes < 1:
        parser.error(f"--max-shard-bytes={given.max_shard_bytes}: must be at least 1")
    folder = given.checkpoint
    if step_of(folder) is None:
        inner = folder / "checkpoints"
        found = checkpoints(inner if inner.is_dir() else folder)
        if not found:
            parser.error(f"{folder} holds no checkpoint; expected folders named step-…")
        folder = found[-1]
    try:
        source = builtin.resolve(given.source, cache_folder())
        export_checkpoint(folder, given.out, source, dtype=given.dtype, max_shard_bytes=given.max_shard_bytes)
    except (CheckpointError, WeightError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.out} holds the weights of {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
