"""Reading checkpoints back: the newest that is whole, into any layout. Ranks call these functions together."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    checkpoints,
    file_problems,
    read_manifest,
    step_of,
)
from hybridrl.checkpoint.optimizer_state import MASTER, moments, prepare, slots
from hybridrl.checkpoint.save import STATE_FILE
from hybridrl.checkpoint.shards import Model, Shards
from hybridrl.models.weights import Piece
from hybridrl.reshard.golden import zero_padding

SET_ASIDE = "aside-"


def newest_whole(parent: Path, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose every byte is what was written; None where there is none at all.

    Each that is not whole is told by `note`, with what is wrong. Ranks share the reading out.
    Raises CheckpointError where there are checkpoints and none of them is whole.
    """
    candidates: list[Any] = [checkpoints(parent) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(candidates)
    told = []
    for folder in reversed(candidates[0]):
        problems = what_is_wrong(folder)
        if not problems:
            return folder
        told.append(f"{folder} is not whole: {'; '.join(problems)}")
        note(f"{told[-1]}; the one before it is used")
    if told:
        raise CheckpointError(
            f"{parent} holds {len(told)} checkpoints and none is whole; start anew with trainer.resume=none\n"
            + "\n".join(told)
        )
    return None


def what_is_wrong(folder: Path) -> list[str]:
    """Why a checkpoint is not whole; empty where it is. Ranks read a share of the files each, and agree."""
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        files = read_manifest(folder).files
        mine = file_problems(folder, files, sorted(files)[rank::world])
    except CheckpointError as error:
        mine = [str(error)]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    return list(dict.fromkeys(problem for some in everyone for problem in some))


def put_later_aside(parent: Path, step: int) -> list[Path]:
    """Renames checkpoints of later steps, whole or not, to `aside-…`: a run that goes on from `step` makes its own,
    and must not meet these. On one rank. Returns the new names."""
    moved = []
    for folder in checkpoints(parent):
        if (step_of(folder) or 0) > step:
            target, number = parent / f"{SET_ASIDE}{folder.name}", 1
            while target.exists():
                target, number = parent / f"{SET_ASIDE}{folder.name}.{number}", number + 1
            folder.rename(target)
            moved.append(target)
    return moved


def load_states(folder: Path) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """States of the parts that are alike on all ranks, and of each rank's own."""
    found = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    return found["shared"], [torch.load(io.BytesIO(own), weights_only=True) for own in found["per_rank"]]


@torch.no_grad()
def load_model(folder: Path, manifest: Manifest, model: Model, *, optimizer: bool) -> None:
    """Reads a model, with its optimizer or without it; without, masters become what the weights are.

    Raises CheckpointError where the checkpoint does not hold this model, or its optimizer.
    """
    saved = manifest.models.get(model.name)
    if saved is None:
        raise CheckpointError(f"{folder} holds no {model.name}, only {', '.join(manifest.models) or 'no model'}")
    shards = model.weights(owned=False)
    if optimizer:
        _check_masters(folder, saved["kinds"], model)
        _check_moments(folder, saved["kinds"], model)
        kinds = [kind for kind in saved["kinds"] if kind != MASTER]
        prepare(model.optimizer, kinds, saved["step"])
        shards |= model.optimizer_state(owned=False)
    pieces: Sequence[Piece] = model.layout.pieces(model.rank)
    zero_padding(pieces, model.tensors())
    _read(folder, model.name, shards)
    if not optimizer:
        for part in model.optimizer:
            part.reload_model_params()


def _check_masters(folder: Path, kinds: Sequence[str], model: Model) -> None:
    """Raises CheckpointError, on all ranks, where only one of the checkpoint and this run has float32 masters: what
    they say beyond the weights would be lost, or made up."""
    held = [False] * dist.get_world_size()
    dist.all_gather_object(held, any(slot.is_master for slot in slots(model.optimizer, model.tensors())))
    if any(held) != (MASTER in kinds):
        found, wanted = ("float32 masters", "none") if MASTER in kinds else ("no float32 masters", "them")
        raise CheckpointError(
            f"{folder} holds {found} of {model.name}, and this run has {wanted}: resume with the model.dtype of the "
            "saved run, or start from its weights (checkpoint.load=weights)"
        )


def _check_moments(folder: Path, kinds: Sequence[str], model: Model) -> None:
    """Raises CheckpointError, on all ranks, where the moments are another optimizer's. One without a step has none."""
    wanted = [moments(model.optimizer)] * dist.get_world_size()
    dist.all_gather_object(wanted, moments(model.optimizer))
    ours, saved = set().union(*wanted), set(kinds) - {MASTER}
    if saved and saved != ours:
        raise CheckpointError(
            f"{folder} holds the moments {', '.join(sorted(saved))} of {model.name}, and this run's optimizer keeps "
            f"{', '.join(sorted(ours)) or 'none'}: resume with the optimizer of the saved run, or start from its "
            "weights (checkpoint.load=weights)"
        )


def _read(folder: Path, name: str, shards: Shards) -> None:
    """Fills the shards' tensors, in place."""
    named = {f"{key}@{index}": shard for key, some in shards.items() for index, shard in enumerate(some)}
    try:
        dist_checkpointing.load(named, str(folder), validate_access_integrity=False)
    except (KeyError, CheckpointingException, CheckpointException, ValueError, RuntimeError) as error:
        text = str(error)
        raise CheckpointError(
            f"{folder} does not hold this run's {name}: {text[:500]}{'…' if len(text) > 500 else ''}; model, "
            "model.dtype and optimizer must be those of the saved run (checkpoint.load=weights needs the model alone)"
        ) from error
