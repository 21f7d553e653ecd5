"""Expert parallelism in SGLang's native MoE, which it lacks: tokens of experts on other ranks come with the id -1."""

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


def _call(*args: Any) -> Tensor:
    result: Tensor = _native(*args)
    return result


def install() -> None:
    """Puts `moe_forward` in the place of SGLang's own, for the life of the process."""
    sg.native_moe_module.moe_forward_native = moe_forward
