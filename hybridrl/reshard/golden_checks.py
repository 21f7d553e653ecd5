"""What is verified before the golden path moves a byte; every problem is told at once, and on every rank alike."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch
import torch.distributed as dist

from hybridrl.models.weights import Box, Param, Piece, Tensor
from hybridrl.reshard.layout import Layout

Params = Mapping[str, torch.Tensor]
"""A rank's parameters and buffers by the names of its layout."""


class WeightError(ValueError):
    """Weights that do not fit their layout, or each other; `problems` has a line for each reason."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{what}:", *problems]))


def agree(what: str, problems: Sequence[str]) -> None:
    """Raises WeightError on every rank where any rank has a problem, with the problems of all. Collective."""
    found = list(problems)
    if dist.is_initialized() and dist.get_world_size() > 1:
        told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, list(problems))
        first_rank = {problem: rank for rank, some in reversed(list(enumerate(told))) for problem in some}
        found = [f"rank {rank}: {problem}" for problem, rank in sorted(first_rank.items(), key=lambda item: item[1])]
    if found:
        raise WeightError(what, found)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def storage_problems(layout: Layout, params: Params, rank: int) -> list[str]:
    """Every way in which a rank's real parameters are not what the layout says, in names, shapes and dtypes, or are not
    there: reading a storage that was released ends the process."""
    expected = layout.params(rank) if rank in layout.ranks else {}
    found = [f"parameter {name} is missing" for name in expected if name not in params]
    found += [f"parameter {name} is unknown to the layout" for name in params if name not in expected]
    for name, want in expected.items():
        if name not in params:
            continue
        real = params[name]
        if tuple(real.shape) != want.shape:
            found.append(f"parameter {name} has shape {list(real.shape)}, the layout expects {list(want.shape)}")
        if dtype_name(real.dtype) != want.dtype:
            found.append(f"parameter {name} is {dtype_name(real.dtype)}, the layout expects {want.dtype}")
        if real.numel() and not real.untyped_storage().nbytes():
            found.append(f"parameter {name} has no memory: its owner sleeps, or it was offloaded; bring it back first")
    return found


class Sources:
    """For each tensor of a layout, the boxes it is made of and one rank that has each: the lowest of its holders."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._params: dict[int, Mapping[str, Param]] = {}

    def owned(self, tensor: str) -> list[tuple[Piece, int]]:
        """Distinct boxes, in the layout's order, each with the piece of its lowest rank."""
        found: dict[Box, tuple[Piece, int]] = {}
        for holder in self.layout.holders(tensor):
            best = found.get(holder.piece.box)
            if best is None or holder.ranks[0] < best[1]:
                found[holder.piece.box] = (holder.piece, holder.ranks[0])
        return list(found.values())

    def dtype(self, piece: Piece, rank: int) -> str:
        """Dtype of the parameter that holds a piece."""
        if rank not in self._params:
            self._params[rank] = self.layout.params(rank)
        return self._params[rank][piece.param].dtype

    def problems(self, tensor: Tensor) -> list[str]:
        """Whether the boxes make up the tensor exactly once, in one dtype."""
        owned = self.owned(tensor.name)
        boxes = [piece.box for piece, _ in owned]
        found = [
            f"tensor {tensor.name}: boxes {one} and {other} overlap without being equal"
            for one, other in combinations(boxes, 2)
            if one.intersect(other)
        ]
        if not found and sum(box.size for box in boxes) != tensor.size:
            found.append(f"tensor {tensor.name}: ranks hold {sum(box.size for box in boxes)} of {tensor.size} elements")
        dtypes = sorted({self.dtype(piece, rank) for piece, rank in owned})
        if len(dtypes) > 1:
            found.append(f"tensor {tensor.name} is held in more than one dtype: {', '.join(dtypes)}")
        return found


def pair_problems(source: Layout, destination: Layout) -> list[str]:
    """Tensors that only one side knows, or that the sides shape differently."""
    ours, theirs = source.weights, destination.weights
    found = [f"tensor {t.name} is in the source only" for t in ours if t.name not in theirs]
    found += [f"tensor {t.name} is in the destination only" for t in theirs if t.name not in ours]
    return found + [
        f"tensor {t.name} has shape {list(t.shape)} in the source, {list(theirs[t.name].shape)} in the destination"
        for t in ours
        if t.name in theirs and t.shape != theirs[t.name].shape
    ]


def dtype_problems(source: Layout, pieces: Iterable[Piece], params: Params) -> list[str]:
    """Destination pieces of another dtype than their source's; each tensor is told once."""
    sources, found = Sources(source), {}
    for piece in pieces:
        have = {sources.dtype(one, rank) for one, rank in sources.owned(piece.tensor)}
        want = dtype_name(params[piece.param].dtype)
        if have != {want}:
            found[piece.tensor] = (
                f"tensor {piece.tensor} is {', '.join(sorted(have))} in the source and {want} in the destination: "
                "ask for convert=True"
            )
    return list(found.values())


def sharing_problems(one: Params, other: Params) -> list[str]:
    """Parameters of two sides on one storage, where writing one side would change the other."""
    storages = {param.untyped_storage().data_ptr(): name for name, param in one.items()}
    return [
        f"parameter {name} of the destination shares storage with {storages[param.untyped_storage().data_ptr()]}"
        for name, param in other.items()
        if param.numel() and param.untyped_storage().data_ptr() in storages
    ]
