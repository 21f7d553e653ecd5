"""A module's parameters and buffers by name, as the module holds them now.

A dictionary of tensors goes on to hold those that it was made of, whatever becomes of the module: after
`load_state_dict(assign=True)`, a conversion that makes new parameters, or an assignment to an attribute, the module
computes with others. This mapping then has the others, so that who compares them finds out.
"""

from collections.abc import Iterable, Iterator, Mapping, ValuesView

import torch

Slot = tuple[Mapping[str, torch.Tensor | None], str]
"""A module's own table of parameters or buffers, and a name in it."""


class LiveTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. A name whose module has none any more is still there, and has an empty tensor."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = dict(slots)

    def __getitem__(self, name: str) -> torch.Tensor:
        return _held(self._slots[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def values(self) -> ValuesView[torch.Tensor]:
        """The tensors, in the order of the names."""
        return _Values(self)


class _Values(ValuesView[torch.Tensor]):
    """Quicker than asking for name after name."""

    _mapping: LiveTensors

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(_held, self._mapping._slots.values())


def live_tensors(root: torch.nn.Module, names: Iterable[str]) -> LiveTensors:
    """Those of a module and what is in it, by their paths. Raises KeyError for one that is not there."""
    slots: dict[str, Slot] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        slots[name] = slot(module, last)
    return LiveTensors(slots)


def slot(module: torch.nn.Module, name: str) -> Slot:
    """Where a module holds a parameter or buffer of its own. Raises KeyError where it has none of that name."""
    table = module._parameters if name in module._parameters else module._buffers
    if table.get(name) is None:
        raise KeyError(f"{type(module).__name__} has no parameter or buffer {name}")
    return table, name


def _held(slot: Slot) -> torch.Tensor:
    table, name = slot
    found = table.get(name)
    return torch.empty(0) if found is None else found
