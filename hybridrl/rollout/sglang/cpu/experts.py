"""Expert parallelism in SGLang's native MoE, which it lacks: tokens of experts on other ranks come with the id -1.

With data-parallel attention the sums over all ranks' experts go back to those whose tokens they are, for which SGLang
knows NCCL alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.rollout.sglang import internals as sg

_native = sg.native_moe_module.moe_forward_native


def moe_forward(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """The sum over this rank's experts: [tokens, hidden]."""
    weights, ids = topk_output.topk_weights, topk_output.topk_ids
    here = ids >= 0
    if bool(here.all()):
        return _call(layer, x, topk_output, moe_runner_config)
    total = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        rows = here[:, choice].nonzero()[:, 0]
        if len(rows):
            part = topk_output._replace(
                topk_weights=weights[rows, choice : choice + 1], topk_ids=ids[rows, choice : choice + 1]
            )
            total.index_add_(0, rows, _call(layer, x[rows], part, moe_runner_config))
    return total


def reduce_scatterv(
    group: Any, input_: Tensor, output: Tensor | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's rows of the sum over the group, `sizes` rows a rank, by way of the whole sum."""
    result: Tensor = group._deterministic_reduce_scatterv(input_, output, sizes)
    return result


def _call(*args: Any) -> Tensor:
    result: Tensor = _native(*args)
    return result


def install() -> None:
    """Puts `moe_forward` and `reduce_scatterv` in the place of SGLang's own, for the life of the process."""
    sg.native_moe_module.moe_forward_native = moe_forward
    sg.parallel_state.GroupCoordinator.reduce_scatterv = reduce_scatterv
