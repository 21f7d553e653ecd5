"""Float32 master weights from the checkpoint's own values, where the parameters are of a lower precision.

Megatron's optimizer copies its masters from the parameters, which the import has rounded. What was rounded off is read
again here, so that training in bfloat16 starts from the model of the files.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrl.checkpoint.safetensors_folder import SafetensorsFolder
from hybridrl.models.weights import Piece
from hybridrl.reshard.golden import write_piece
from hybridrl.reshard.golden_checks import Params, dtype_name


@torch.no_grad()
def import_masters(folder: Path | str, pieces: Iterable[Piece], params: Params, optimizers: Sequence[Any]) -> None:
    """Overwrites the masters of those parameters that hold tensors of another dtype than the files.

    One parameter at a time is held in float32 beside the masters. Padding gets a master of 0.

    Args:
        folder: the Hugging Face folder that `params` were imported from.
        pieces: of this rank.
        params: this rank's parameters by the layout's names, as Megatron's optimizer has them.
        optimizers: the parts of Megatron's chained optimizer.
    """
    files = SafetensorsFolder(folder)
    by_param: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.tensor not in files.tensors:  # new in this model: the parameter is exact
            continue
        by_param.setdefault(piece.param, []).append(piece)
    for name, param in params.items():
        master = getattr(param, "main_param", None)  # None also where another replica has this parameter's shard
        held = by_param.get(name, [])  # none where a rank has nothing but padding
        if master is None or all(files.tensors[p.tensor].dtype == dtype_name(param.dtype) for p in held):
            continue
        whole: Mapping[str, torch.Tensor] = {name: torch.zeros(param.shape, dtype=torch.float32, device=master.device)}
        for piece in held:
            write_piece(whole, piece, files.read(piece.tensor, piece.box))
        start, stop = _owned(param, optimizers)
        master.copy_(whole[name].flatten()[start:stop].view_as(master))


def _owned(param: torch.Tensor, optimizers: Sequence[Any]) -> tuple[int, int]:
    """The range of the flat parameter whose master this rank has: all, or a shard of the distributed optimizer's."""
    if not getattr(param, "main_param_sharded", False):
        return 0, param.numel()
    (owner,) = (part for part in optimizers if param in part.model_param_gbuf_map)
    found = owner._get_model_param_range_map(param)["param"]
    return found.start, found.end
