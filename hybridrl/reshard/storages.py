"""Live tensors on both sides of a reshard: whether they are what the plan was made for, and stay where they are."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

Tensors = Mapping[str, torch.Tensor]
"""A rank's parameters and buffers by the names of its layout."""


def device_of(*sides: Tensors) -> torch.device:
    """Where these tensors lie; on a rank without any, where the others' do: by the backend of the world."""
    found = next((tensor.device for side in sides for tensor in side.values()), None)
    if found is not None:
        return found
    cuda = dist.is_initialized() and "cuda:nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class _Home(NamedTuple):
    """Where a tensor lay when it was recorded."""

    storage: int
    offset: int
    nbytes: int


class Storages:
    """Remembers where tensors lie, and finds those that have been given other storage since.

    Views compiled over a storage go on writing to it after a careless `param.data = …`: the old storage would get the
    weights and the engine would never see them. Where the mapping is of modules as they are now
    (`hybridrl.models.live`), a parameter in whose place there is another is found as well. A storage that was released
    and taken back in place (`storage.resize_`) is still the same one, wherever its bytes are now.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._kept = [tensor.detach() for tensor in tensors.values()]  # so that no other storage gets their place
        self._homes = {name: _home(tensor) for name, tensor in tensors.items()}
        self._pointers = self._addresses()

    def problems(self) -> list[str]:
        """A line for each tensor that lies elsewhere or whose storage is released; quick where nothing moved."""
        pointers = self._addresses()
        if pointers == self._pointers:
            return []
        found = []
        for name, tensor in self._tensors.items():
            now, then = _home(tensor), self._homes[name]
            if now[:2] != then[:2]:
                found.append(f"{name} was given another storage: write into it in place, or make a new weight sync")
            elif now.nbytes < then.nbytes:
                found.append(f"{name}: its storage of {then.nbytes} bytes has {now.nbytes} now; wake its owner first")
        if not found:
            self._pointers = pointers
        return found

    def _addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors.values()))  # every sync asks this of every parameter


def _home(tensor: torch.Tensor) -> _Home:
    storage = tensor.untyped_storage()
    return _Home(storage._cdata, int(tensor.storage_offset()), storage.nbytes())


def device_problems(source: Tensors, destination: Tensors) -> list[str]:
    """Tensors that are not all on one device."""
    places: dict[torch.device, str] = {}
    for side, tensors in (("the source's", source), ("the destination's", destination)):
        for name, tensor in tensors.items():
            places.setdefault(tensor.device, f"{side} {name} is on {tensor.device}")
    return [] if len(places) <= 1 else [f"tensors are on several devices: {', '.join(places.values())}"]


def overlap_problems(source: Tensors, destination: Tensors, aliases: Collection[tuple[str, str]]) -> list[str]:
    """Destination tensors that share bytes with a source or with each other, so that writing one changes the other.

    `aliases` are pairs of a source and a destination that may be the very same bytes; so may two destinations of one
    source, and two sources of which one is such a pair's.
    """
    shared = {name: span(source[origin]) for origin, name in aliases if origin in source}
    spans = [(*span(tensor), True, name) for name, tensor in source.items() if tensor.numel()]
    spans += [(*span(tensor), False, name) for name, tensor in destination.items() if tensor.numel()]
    spans.sort(key=lambda entry: (entry[0], not entry[2]))
    found = []
    # By side, the span that reaches furthest so far: a later one that starts before its end overlaps it.
    furthest: dict[bool, tuple[int, int, str]] = {}
    for start, stop, is_source, name in spans:
        for other_is_source, (first, last, other) in furthest.items():
            if start >= last or (is_source and other_is_source):
                continue
            written = [n for n, side in ((name, is_source), (other, other_is_source)) if not side]
            if (start, stop) == (first, last) and all(shared.get(n) == (start, stop) for n in written):
                continue
            sides = [
                f"{'source' if side else 'destination'} {n}"
                for side, n in ((other_is_source, other), (is_source, name))
            ]
            found.append(f"{sides[0]} and {sides[1]} share bytes: writing one would change the other")
        if is_source not in furthest or stop > furthest[is_source][1]:
            furthest[is_source] = (start, stop, name)
    return found


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the one after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + reach * tensor.element_size()
