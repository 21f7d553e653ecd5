"""The engine's layout, and that SGLang's parameters are those of it. Both hostings use it."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from hybridrl.models.families import load_spec, weight_map
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.rollout.sglang.options import EngineOptions


def layout_of(options: EngineOptions) -> SGLangLayout:
    """SGLang's layout in the present world. Raises ValueError where the sizes do not fit the model or the world."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: the engine is made in the trainer's world")
    sizes = RolloutSizes(world=dist.get_world_size(), tp=options.tp, ep=options.ep)
    layout = SGLangLayout(weight_map(load_spec(options.folder)), sizes, dtype=options.dtype)
    return layout if options.ranks is None else layout.with_ranks(options.ranks)


def check_parameters(have: Mapping[str, Tensor], layout: SGLangLayout, rank: int) -> dict[str, Tensor]:
    """SGLang's parameters in the layout's order. ValueError lists every name, shape and dtype that differs."""
    expected = {name: (p.shape, p.dtype) for name, p in layout.params(rank).items()}
    found = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in have.items()}
    wrong = [
        f"{name} is {found.get(name, 'absent')} in SGLang, {expected.get(name, 'absent')} in the layout"
        for name in expected | found
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        raise ValueError(f"SGLang's model and its layout disagree: {'; '.join(wrong)}")
    return {name: have[name] for name in expected}
