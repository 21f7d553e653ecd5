"""What Megatron's optimizers hold for each parameter: float32 masters, moments, and how many steps they have made.

One view of all of them: plain and mixed-precision optimizers, which hold whole parameters, and the distributed one,
which holds flat ranges; Adam of torch, of Transformer Engine or of Apex, and SGD.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

STEP = "step"
MASTER = "master"


@dataclass(frozen=True)
class Slot:
    """A parameter's elements `start` to `stop` (exclusive, flat) as an optimizer updates them."""

    param: str
    """The layout's name of the parameter."""
    shape: tuple[int, ...]
    """Of the whole local parameter."""
    main: torch.Tensor
    """Float32: a master, or the parameter itself (or a view of it) where that is float32."""
    start: int
    stop: int
    leader: int | None
    """Lowest of the ranks that share the parameter's elements out; None where each holds all of them."""
    state: dict[str, Any]
    """The optimizer's own, by its names."""
    is_master: bool

    def values(self) -> dict[str, torch.Tensor]:
        """What there is to save beside the model's weights, by kind; each has the elements of `main`."""
        found = {MASTER: self.main.detach()} if self.is_master else {}
        return found | {
            kind: value
            for kind, value in self.state.items()
            if kind != STEP and isinstance(value, torch.Tensor) and value.numel() == self.main.numel()
        }


def slots(parts: Sequence[Any], params: Mapping[str, torch.Tensor]) -> list[Slot]:
    """All slots of a chained optimizer's parts. `params` are this rank's, by the layout's names."""
    names = {id(tensor): name for name, tensor in params.items()}
    return [slot for part in parts if not part.is_stub_optimizer for slot in _slots(part, names)]


def _slots(part: Any, names: Mapping[int, str]) -> Iterator[Slot]:
    state = part.optimizer.state
    for param, main, (start, stop), leader in _pairs(part):
        yield Slot(
            param=names[id(param)],
            shape=tuple(param.shape),
            main=main,
            start=start,
            stop=stop,
            leader=leader,
            state=state.get(main, {}),  # a look at it must not make one
            is_master=param.dtype != torch.float32,
        )


def _pairs(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int], int | None]]:
    """A part's parameters: each with its main values, their flat range and the leader of the ranks that share it."""
    if hasattr(part, "model_param_gbuf_map"):  # the distributed optimizer
        leader = min(dist.get_process_group_ranks(part.data_parallel_group))
        for param in part.model_param_gbuf_map:
            group, order = part.model_param_group_index_map[param]
            held = part._get_model_param_range_map(param)["param"]
            yield param, part.optimizer.param_groups[group]["params"][order], (held.start, held.end), leader
        return
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for low, high in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for pair in zip(low, high, strict=True)
        ]
        pairs += [(param, param) for group in part.fp32_from_fp32_groups for param in group]
    else:
        pairs = [(param, param) for param in part.get_parameters()]
    yield from ((param, main, (0, param.numel()), None) for param, main in pairs)


def moments(parts: Sequence[Any]) -> set[str]:
    """Kinds of moments that the optimizer keeps of each parameter once it has made a step; none on a rank without."""
    found: set[str] = set()
    for part in parts:
        if part.is_stub_optimizer:
            continue
        if "SGD" not in type(part.optimizer).__name__:  # torch's, Apex's or Transformer Engine's
            found |= {"exp_avg", "exp_avg_sq"}
        elif any(group["momentum"] for group in part.optimizer.param_groups):
            found.add("momentum_buffer")
    return found


def steps_made(parts: Sequence[Any]) -> int:
    """Steps that the moments have seen: one number for all parameters; 0 where there are no moments.

    Raises ValueError where parameters differ: a checkpoint has one number.
    """
    found: set[int] = set()
    for part in parts:
        if part.is_stub_optimizer:
            continue
        found |= {int(group[STEP]) for group in part.optimizer.param_groups if STEP in group and group["params"]}
        found |= {int(state[STEP]) for state in part.optimizer.state.values() if STEP in state}
    if len(found) > 1:
        raise ValueError(f"the optimizer's parameters have seen {sorted(found)} steps; expected one number for all")
    return found.pop() if found else 0


def prepare(parts: Sequence[Any], kinds: Sequence[str], step: int) -> None:
    """Gives every parameter room for moments of these kinds, zero as yet, and the number of steps made.

    Tensors that are there already are kept in place. Without kinds the optimizer is as if it had made no step.
    """
    for part in parts:
        if part.is_stub_optimizer:
            continue
        inner = part.optimizer
        counts_by_group = not isinstance(inner, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD)
        for group in inner.param_groups:
            group.pop(STEP, None)
            if kinds and counts_by_group:
                group[STEP] = step
            for main in group["params"]:
                had = inner.state.pop(main, {})
                if not kinds:
                    continue
                state = {kind: had[kind].zero_() if kind in had else torch.zeros_like(main) for kind in kinds}
                if not counts_by_group and not isinstance(inner, torch.optim.SGD):
                    state[STEP] = torch.tensor(float(step), dtype=torch.float32)
                inner.state[main] = state
