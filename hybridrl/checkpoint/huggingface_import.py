"""From a Hugging Face folder into the parameters of any layout: each rank reads only the bytes it holds.

All ranks must see the folder (one file system, or copies). Nothing is communicated, and no rank has the whole model.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from hybridrl.checkpoint.safetensors_folder import SafetensorsFolder
from hybridrl.models.families import load_spec, weight_map
from hybridrl.models.weights import Box, Piece, Role, WeightMap
from hybridrl.reshard.golden import write_piece, zero_padding
from hybridrl.reshard.golden_checks import Params, WeightError, dtype_name, storage_problems
from hybridrl.reshard.layout import Layout

DERIVED = ("rotary_emb.inv_freq",)
"""Endings of names that some checkpoints hold though they follow from the configuration."""
TIED_HEAD = "lm_head.weight"
ROWS_AT_ONCE = 4096


def import_weights(folder: Path | str, layout: Layout, params: Params, rank: int, *, convert: bool = False) -> None:
    """Loads a rank's parameters from the folder's safetensors and zeroes their padding.

    A model with a scalar head takes the layers of a language model too: its `lm_head.weight` is left out, and a head
    that the files have not is 0.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its files.
        layout: where this rank keeps which box of which tensor.
        params: the rank's parameters and buffers by the layout's names, written in place.
        rank: this rank of the world.
        convert: allows parameters of another dtype than the file's; rounding is torch's.

    Raises WeightError before anything is written, with every problem: unknown, missing or misshapen tensors in the
    files, files that contradict their index, parameters that are not the layout's, dtypes that differ without
    `convert`, a tied model's `lm_head.weight` that is not the embedding bit for bit.
    """
    files = SafetensorsFolder(folder)
    problems = files.problems + file_problems(files, layout.weights) + storage_problems(layout, params, rank)
    new = new_tensors(files, layout.weights)
    pieces = [piece for piece in layout.pieces(rank) if piece.tensor not in new]
    if not problems:
        problems += tied_problems(files, layout.weights)
        problems += [] if convert else _dtype_problems(files, pieces, params)
    if problems:
        raise WeightError(f"{folder} cannot be loaded", problems)
    zero_padding(pieces, params)
    for piece in pieces:
        write_piece(params, piece, files.read(piece.tensor, piece.box))


def new_tensors(files: SafetensorsFolder, weights: WeightMap) -> frozenset[str]:
    """The model's tensors that its files need not have and have not: a scalar head over a language model."""
    head = weights.find(Role.SCORE)
    return frozenset() if head is None or head.name in files.tensors else frozenset([head.name])


def file_problems(files: SafetensorsFolder, weights: WeightMap) -> list[str]:
    """Every difference in names and shapes between what the files hold and what the model's configuration implies."""
    allowed = {TIED_HEAD} if weights.spec.tied or weights.spec.scalar_head else set()
    if weights.spec.mtp_layers == 0:
        allowed |= _prediction_tensors(files)
    new = new_tensors(files, weights)
    found = [
        f"tensor {name} in {stored.file} is unknown to the model"
        for name, stored in sorted(files.tensors.items())
        if name not in weights and name not in allowed and not name.endswith(DERIVED)
    ]
    found += [
        f"tensor {t.name} is missing from the files"
        for t in weights
        if t.name not in files.tensors and t.name not in new
    ]
    return found + [
        f"tensor {t.name} has shape {list(files.tensors[t.name].shape)}, the configuration implies {list(t.shape)}"
        for t in weights
        if t.name in files.tensors and files.tensors[t.name].shape != t.shape
    ]


def _prediction_tensors(files: SafetensorsFolder) -> set[str]:
    """What the files hold of prediction layers (MTP), by their own configuration: a model may leave these out."""
    if not (files.folder / "config.json").is_file():
        return set()
    spec = load_spec(files.folder)
    return {t.name for t in weight_map(spec) if t.layer is not None and t.layer >= spec.num_layers}


def _dtype_problems(files: SafetensorsFolder, pieces: Sequence[Piece], params: Params) -> list[str]:
    differing: dict[tuple[str, str], list[str]] = {}
    for piece in pieces:
        pair = files.tensors[piece.tensor].dtype, dtype_name(params[piece.param].dtype)
        if pair[0] != pair[1]:
            differing.setdefault(pair, []).append(piece.tensor)
    return [
        f"{len(set(names))} tensors are {stored} in the files and {held} in memory ({names[0]} first): "
        "ask for convert=True, or make the model in the files' dtype"
        for (stored, held), names in differing.items()
    ]


def tied_problems(files: SafetensorsFolder, weights: WeightMap) -> list[str]:
    """A tied model's file may hold the head too, but only as the same bits."""
    embedding = weights.find(Role.EMBED)
    if not weights.spec.tied or weights.spec.scalar_head or TIED_HEAD not in files.tensors or embedding is None:
        return []
    head, other = files.tensors[TIED_HEAD], files.tensors[embedding.name]
    equal = (head.shape, head.dtype) == (other.shape, other.dtype)
    for start in range(0, head.shape[0] if equal else 0, ROWS_AT_ONCE):
        rows = Box.whole(head.shape).narrow(0, start, min(start + ROWS_AT_ONCE, head.shape[0]))
        ours, theirs = files.read(TIED_HEAD, rows), files.read(embedding.name, rows)
        equal = equal and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    if equal:
        return []
    return [
        f"tensor {TIED_HEAD} differs from {embedding.name}, though tie_word_embeddings is true: "
        "set it to false, or remove the tensor"
    ]
