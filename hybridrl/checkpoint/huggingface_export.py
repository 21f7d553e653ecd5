"""From any layout to a Hugging Face folder that transformers loads, streamed: no rank ever holds the whole model.

Files are written by different ranks into one folder, which every rank must see under the same path (a shared file
system). The folder appears under its name only when it is whole. Every rank must call `export_weights` together.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint.safetensors_file import SafetensorsFile
from hybridrl.checkpoint.safetensors_folder import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from hybridrl.models.families import UnsupportedModelError, load_spec, weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Param, Role, Tensor, WeightMap
from hybridrl.reshard.golden import BUCKET_BYTES, differing_replicas, gather_problems, stream
from hybridrl.reshard.golden_checks import Params, Sources, agree
from hybridrl.reshard.layout import Layout

MAX_SHARD_BYTES = 5_000_000_000
SOURCE = "source"
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
WRITTEN = ("float32", "bfloat16", "float16")
"""Dtypes of a source's files that an export takes over; of tensors in others it keeps that of the parameters."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
)


def export_weights(
    folder: Path | str,
    layout: Layout,
    params: Params,
    rank: int,
    *,
    source: Path | str,
    tokenizer: Path | str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    verify_replicas: bool = False,
) -> None:
    """Writes the weights as sharded safetensors with an index, beside configuration, generation config and tokenizer.

    A rank holds at most `bucket_bytes` and one tensor beside its parameters. `config.json` is the source's; its dtype
    becomes the one that is written, a model with a scalar head a `ForSequenceClassification` with one label, and
    prediction layers that are not in the layout are none.

    Args:
        folder: made by this call; must not hold anything yet.
        layout: where the ranks keep the tensors.
        params: this rank's parameters by the layout's names.
        rank: this rank of the world.
        source: the Hugging Face folder that the model came from.
        tokenizer: folder of the tokenizer's files, None for `source`.
        dtype: dtype of the files, as torch names it, for all but roles whose dtype the model fixes; `source` takes
            each tensor's from the source's files; None keeps that of the parameters.
        max_shard_bytes: size of a file, which a single larger tensor may exceed.
        bucket_bytes: bytes in flight at once.
        verify_replicas: first compares all copies of each box bit for bit.

    Raises WeightError on every rank with every problem: a folder that is there already, a source that describes
    another model, parameters that do not fit the layout, copies that differ, files that could not be written. The
    folder does not exist then.
    """
    folder, source = Path(folder), Path(source)
    problems = gather_problems(layout, params, rank, (t.name for t in layout.weights))
    files_of_source = SafetensorsFolder(source) if dtype == SOURCE else None
    problems += files_of_source.problems if files_of_source else []
    agree(f"{folder} cannot be exported", _folder_problems(folder, source, layout.weights) + problems)
    if verify_replicas:
        agree(f"{folder} cannot be exported", differing_replicas(layout, params, rank))
    stored = _stored(layout, dtype, files_of_source)
    files = _plan_files(stored, max_shard_bytes)
    aside = _make_aside(folder, rank == layout.ranks[0])
    try:
        agree(f"{folder} could not be written", _write_files(aside, files, layout, params, rank, bucket_bytes))
        problems = []
        if rank == layout.ranks[0]:
            embedding = next(t.name for t in layout.weights if t.role is Role.EMBED)
            main = next(t.dtype for t in stored if t.name == embedding)
            spec = layout.weights.spec
            problems = _finish(aside, folder, files, main, source, Path(tokenizer or source), spec)
        agree(f"{folder} could not be written", problems)
    finally:
        if rank == layout.ranks[0]:
            shutil.rmtree(aside, ignore_errors=True)  # gone already where all went well


def _folder_problems(folder: Path, source: Path, weights: WeightMap) -> list[str]:
    found = [f"{folder} is there already: choose another name or remove it"] if folder.exists() else []
    try:
        spec = weights.spec
        described = weight_map(replace(load_spec(source), scalar_head=spec.scalar_head, mtp_layers=spec.mtp_layers))
    except (OSError, UnsupportedModelError) as error:
        return [*found, f"{source} as source: {error}"]
    ours, theirs = {t.name: t.shape for t in weights}, {t.name: t.shape for t in described}
    return found + [
        f"tensor {name} is {ours.get(name)} here, {theirs.get(name)} by {source / 'config.json'}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def _stored(layout: Layout, dtype: str | None, files: SafetensorsFolder | None) -> list[Param]:
    """Name, shape and dtype of each tensor in the files."""
    sources, fixed = Sources(layout), layout.weights.spec.dtypes
    found = []
    for tensor in layout.weights:
        wanted = sources.dtype(*sources.owned(tensor.name)[0])
        if files is not None:
            kept = files.tensors.get(tensor.name)
            wanted = kept.dtype if kept is not None and kept.dtype in WRITTEN else wanted
        elif dtype is not None:
            wanted = fixed.get(tensor.role, dtype)
        found.append(Param(tensor.name, tensor.shape, wanted))
    return found


def _plan_files(tensors: Sequence[Param], max_bytes: int) -> Mapping[str, Sequence[Param]]:
    """Tensors by file, in order; a file is closed when the next tensor would exceed the limit."""
    groups: list[list[Param]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _make_aside(folder: Path, first: bool) -> Path:
    """An empty folder beside the one to be made, known to every rank."""
    told: list[Any] = [None, []]
    if first:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            told[0] = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
            Path(told[0]).chmod(0o755)
        except OSError as error:
            told[1] = [f"{folder.parent}: {error}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
        told = next(one for one in everyone if one[0] or one[1])
    agree(f"{folder} cannot be exported", told[1])
    return Path(told[0])


def _write_files(
    aside: Path, files: Mapping[str, Sequence[Param]], layout: Layout, params: Params, rank: int, bucket_bytes: int
) -> list[str]:
    """Writes this rank's files; a rank that cannot go on writing still takes part in every exchange."""
    problems: list[str] = []
    for index, (name, tensors) in enumerate(files.items()):
        writer = layout.ranks[index % len(layout.ranks)]
        names = [tensor.name for tensor in tensors]
        values = stream(layout, params, rank, names, bucket_bytes=bucket_bytes, to=writer)
        try:
            if rank == writer:
                _write_file(aside / name, tensors, values)
        except OSError as error:
            problems.append(f"{aside / name}: {error}")
        for _ in values:
            pass
    return problems


def _write_file(path: Path, tensors: Sequence[Param], values: Iterator[tuple[Tensor, torch.Tensor]]) -> None:
    dtypes = {tensor.name: getattr(torch, tensor.dtype) for tensor in tensors}
    with SafetensorsFile(path, tensors) as file:
        for tensor, value in values:
            file.write(tensor.name, value.to(dtypes[tensor.name]))
            del value  # before the next tensor is made


def _finish(
    aside: Path,
    folder: Path,
    files: Mapping[str, Sequence[Param]],
    dtype: str,
    source: Path,
    tokenizer: Path,
    spec: ModelSpec,
) -> list[str]:
    """Adds the index, the configuration and its companions, and gives the folder its name."""
    try:
        if len(files) > 1:
            (aside / INDEX_FILE).write_text(json.dumps(_index(files), indent=2) + "\n", encoding="utf-8")
        _write_config(aside, source, dtype, spec)
        for origin, patterns in ((source, ("generation_config.json",)), (tokenizer, TOKENIZER_FILES)):
            for path in (path for pattern in patterns for path in origin.glob(pattern)):
                if path.is_dir():
                    shutil.copytree(path, aside / path.name)
                else:
                    shutil.copyfile(path, aside / path.name)
        aside.rename(folder)
    except OSError as error:
        return [f"{folder}: {error}"]
    return []


def _write_config(aside: Path, source: Path, dtype: str, spec: ModelSpec) -> None:
    """The source's configuration byte for byte, but for a dtype, head or prediction layers that are no longer true."""
    text = (source / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    changed = {**config, key: dtype}
    if spec.mtp_layers == 0:
        changed |= {key: 0 for key in MTP_KEYS if config.get(key)}
    if spec.scalar_head:
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []]
        changed |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if changed != config:
        text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
    (aside / "config.json").write_text(text, encoding="utf-8")


def _index(files: Mapping[str, Sequence[Param]]) -> dict[str, Any]:
    placed = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    every = [tensor for tensors in files.values() for tensor in tensors]
    sizes = {"total_parameters": sum(t.size for t in every), "total_size": sum(t.nbytes for t in every)}
    return {"metadata": sizes, "weight_map": dict(sorted(placed.items()))}
