"""SGLang's model as it was built, whichever process hosts it: it must hold what the layout says, where it says."""

from pathlib import Path
from typing import Any

import torch

from hybridrl.models.families import trained_spec, weight_map
from hybridrl.models.live import LiveTensors, live_tensors
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.rollout.parameters import by_layout
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.order import order_problems
from hybridrl.rollout.sglang.probe import probe


def checked_parameters(model: torch.nn.Module, layout: Layout, rank: int) -> LiveTensors:
    """The model's live parameters, by the layout's names and in its order; none of them is to be trained.

    On a GPU their values are undefined afterwards: the probe has written to them.

    Raises ValueError that names modules whose kernels want another order, parameters of other names, shapes or dtypes,
    and on a GPU those in which SGLang's own loader puts elements elsewhere than the layout says.
    """
    if found := order_problems(model):
        raise ValueError(f"SGLang's modules hold parameters otherwise than its checkpoints: {'; '.join(found)}")
    have = dict(model.requires_grad_(False).named_parameters())
    parameters = by_layout(have, layout, rank, owner="SGLang's model")
    if not sg.ON_CPU and (found := probe(model, layout, parameters, rank)):
        raise ValueError(f"SGLang puts parameters otherwise than its layout says: {'; '.join(found)}")
    return live_tensors(model, parameters)


def replica_layout(server_args: Any) -> SGLangLayout:
    """The layout of one replica that was started with these ServerArgs; its ranks count from 0."""
    weights = weight_map(trained_spec(Path(server_args.model_path)))
    sizes = RolloutSizes(
        world=server_args.tp_size,
        tp=server_args.tp_size,
        ep=server_args.ep_size,
        moe_dense_tp=server_args.moe_dense_tp_size,
        dp_lm_head=server_args.enable_dp_lm_head,
    )
    return SGLangLayout(weights, sizes, dtype=server_args.dtype)
