"""Sharing storage: destination parameters that become the source's own, so that no sync has to move them."""

from collections.abc import Callable, Mapping

import torch

from hybridrl.reshard.plan import Alias, Plan
from hybridrl.reshard.storages import Tensors

Adopt = Callable[[Mapping[str, torch.Tensor]], None]
"""Gives destination parameters, by name, this storage in place of their own, for good.

Raises ValueError that names what cannot be so. The tensors that were handed to the weight sync must follow.
"""


def share(plan: Plan, source: Tensors, destination: Tensors, adopt: Adopt) -> list[str]:
    """Has every alias of the plan adopted; what went wrong, a line each, and nothing is to be synchronised then."""
    wanted = {alias.destination: source[alias.source].detach() for alias in plan.aliases}
    gaps = [
        f"source {a.source} is not contiguous: {a.destination} cannot share it"
        for a in plan.aliases
        if not source[a.source].is_contiguous()
    ]
    if gaps:
        return gaps
    try:
        adopt(wanted)
    except ValueError as error:
        return [str(error)]
    return [
        f"destination {alias.destination} was to share the storage of source {alias.source}, and does not: the tensor "
        "given for it is not the one that the engine reads"
        for alias in plan.aliases
        if not is_shared(alias, source, destination)
    ]


def is_shared(alias: Alias, source: Tensors, destination: Tensors) -> bool:
    """Whether the two sides of an alias are one storage, at one place."""
    return source[alias.source].data_ptr() == destination[alias.destination].data_ptr()


def adopt_data(tensors: Tensors) -> Adopt:
    """For a destination whose `tensors` are what it reads itself, such as the parameters of a module."""

    def adopt(shared: Mapping[str, torch.Tensor]) -> None:
        for name, storage in shared.items():
            tensors[name].data = storage

    return adopt
