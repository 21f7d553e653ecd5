"""Everything of a run that is no tensor of a model, by name: counters, places in the data, controllers, buffers.

A part is anything with `state_dict` and `load_state_dict`. What `state_dict` returns must be plain: numbers, text,
bytes, arrays, tensors, None, and lists, tuples and dicts of them. It is copied, so that the run may go on at once.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Stateful(Protocol):
    """A part of a run that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """What the part needs to go on; plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises ValueError for a state that does not fit."""


class StateError(ValueError):
    """A checkpoint and the run that reads it do not have the same parts."""


class States:
    """The registry. A part that is added to a run that goes on gets its saved state at once.

    Parts are alike on all ranks, and rank 0's are saved, unless they are added as `per_rank`.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self._per_rank: set[str] = set()
        self._saved: dict[str, Any] | None = None
        self._own: dict[str, Any] | None = None

    def add(self, name: str, part: Stateful, *, per_rank: bool = False) -> None:
        """Raises ValueError for a name that is taken, StateError where the checkpoint has no such part."""
        if name in self._parts:
            raise ValueError(f"two parts of the run are called {name}")
        self._parts[name] = part
        if per_rank:
            self._per_rank.add(name)
        if self._saved is not None:
            self._load(name)

    def collect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """States of the parts that are alike on all ranks, and of those that are this rank's own."""
        found = {name: _packed(part.state_dict()) for name, part in self._parts.items()}
        own = {name: state for name, state in found.items() if name in self._per_rank}
        return {name: state for name, state in found.items() if name not in own}, own

    def restore(self, saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Hands the saved states to the parts, now or when they are added.

        `own` is what this rank saved; None where the world is another one, and no rank is what it was. Raises
        StateError for a part that was not saved.
        """
        self._saved, self._own = dict(saved), None if own is None else dict(own)
        for name in self._parts:
            self._load(name)

    def check(self) -> None:
        """Raises StateError where a part was saved that the run does not have: it would be lost without a word."""
        left = sorted(set(self._saved or ()) - set(self._parts))
        if left:
            raise StateError(
                f"the checkpoint holds {', '.join(left)}, which this run does not have: resume with the algorithm, "
                "data and rollout settings of the saved run, or start from its weights (checkpoint.load=weights)"
            )

    def _load(self, name: str) -> None:
        assert self._saved is not None
        if name in self._per_rank:
            if self._own is not None and name in self._own:
                self._parts[name].load_state_dict(_unpacked(self._own[name]))
            return
        if name not in self._saved:
            raise StateError(
                f"the checkpoint holds no {name}, only {', '.join(sorted(self._saved)) or 'nothing'}: resume with the "
                "algorithm, data and rollout settings of the saved run, or start from its weights "
                "(checkpoint.load=weights)"
            )
        self._parts[name].load_state_dict(_unpacked(self._saved[name]))


class RandomStates:
    """The generators of this process: Python's, NumPy's, torch's on CPU and device, and Megatron's named ones."""

    def __init__(self, tracker: Any) -> None:
        """`tracker` is Megatron's, with `get_states` and `set_states`."""
        self._tracker = tracker

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": [kind, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if _on_cuda() else None,
            "megatron": dict(self._tracker.get_states()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
        torch.set_rng_state(state["torch"])
        if _on_cuda() and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
        self._tracker.set_states(state["megatron"])


ARRAY = "__array__"


def _packed(value: Any) -> Any:
    """A copy in which arrays are tensors, which are read back without running anybody's code."""
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _packed(inner) for key, inner in value.items()}
    return type(value)(map(_packed, value)) if isinstance(value, list | tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return value[ARRAY].numpy() if set(value) == {ARRAY} else {k: _unpacked(v) for k, v in value.items()}
    return type(value)(map(_unpacked, value)) if isinstance(value, list | tuple) else value


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def per_rank(states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any] | None:
    """This rank's own of the states that all ranks of a world saved; None where that world was another one."""
    return states[rank] if len(states) == torch.distributed.get_world_size() else None
