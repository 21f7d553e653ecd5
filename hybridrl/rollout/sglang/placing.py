"""The engine's layout, for both hostings."""

import torch.distributed as dist

from hybridrl.models.families import trained_spec, weight_map
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout, argued_sizes
from hybridrl.rollout.sglang.options import EngineOptions


def layout_of(options: EngineOptions) -> SGLangLayout:
    """SGLang's layout in the present world. Raises ValueError where the sizes do not fit the model or the world."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: the engine is made in the trainer's world")
    sizes = RolloutSizes(
        world=dist.get_world_size(),
        tp=options.tp,
        dp=options.dp,
        ep=options.ep,
        **argued_sizes(options.server_args or {}),
    )
    layout = SGLangLayout(weight_map(trained_spec(options.folder)), sizes, dtype=options.dtype)
    return layout if options.ranks is None else layout.with_ranks(options.ranks)
