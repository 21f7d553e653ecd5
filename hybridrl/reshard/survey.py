"""The survey of a reshard: which ranks need which boxes of which tensors, and who could send them.

Tensors that lie alike in both layouts (the gate projections of the 4 experts that one rank holds, in all layers of a
stage) form one `Kind` and are looked at once. That is what lets one rank of a thousand plan alone: 44,544 expert
tensors of DeepSeek-V3 are about 3,000 kinds. Every rank surveys the same kinds in the same order.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybridrl.models.weights import ITEM_BYTES, Box, Tensor
from hybridrl.reshard.boxes import overlapping, refine
from hybridrl.reshard.layout import ClassedLayout, Holder, Layout

MAX_NAMED = 20


class PlanError(ValueError):
    """Two layouts between which no correct reshard exists; `problems` names each tensor and what is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = [f"and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        super().__init__("\n  ".join([f"{len(problems)} problems in the reshard:", *problems[:MAX_NAMED], *more]))


@dataclass(frozen=True, slots=True)
class Need:
    """A box that `needers` must have and each of `holders` has. Both are in ascending order and may overlap."""

    box: Box
    needers: tuple[int, ...]
    targets: tuple[int, ...]
    """Indices of the destination's holders of the tensor that contain the box on these ranks; the first receives, and
    the others are echoes of it."""
    holders: tuple[int, ...]
    entries: dict[int, int]
    """By source rank, the index of the source's holder of the tensor whose piece it sends from."""
    wire_dtype: str
    exact: bool
    """No dtype changes on the way, so that a rank that has received the box can pass it on."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.box.size * ITEM_BYTES[self.wire_dtype]


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that lie alike in both layouts, with their indices in the destination's weight map, and their needs."""

    tensors: tuple[tuple[int, Tensor], ...]
    needs: tuple[Need, ...]
    source_dtypes: tuple[str, ...]
    """Dtype of the parameter of each of the source's holders."""
    destination_dtypes: tuple[str, ...]


def survey(source: Layout, destination: Layout) -> list[Kind]:
    """All kinds, in the order of their first tensors.

    Raises PlanError with every tensor that is unknown to either side, has another shape there, has no source for some
    of its elements, has sources that overlap unequally, or would be left behind although the destination does not say
    so (`omitted`).
    """
    problems = _name_problems(source, destination)
    keys = _keys(source), _keys(destination)
    groups: dict[Hashable, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(destination.weights):
        if tensor.name in source.weights and source.weights[tensor.name].shape == tensor.shape:
            key = (keys[0](tensor), keys[1](tensor), tensor.shape, tensor.dtype)
            groups.setdefault(key, []).append((index, tensor))
    dtypes = _Dtypes(source), _Dtypes(destination)
    kinds = []
    for members in groups.values():
        kind, wrong = _kind(source, destination, dtypes, members)
        kinds.append(kind)
        problems += wrong
    if problems:
        raise PlanError(problems)
    return kinds


def _name_problems(source: Layout, destination: Layout) -> list[str]:
    if source.weights is destination.weights:
        return []
    omitted: Collection[str] = getattr(destination, "omitted", ())
    found = []
    for tensor in destination.weights:
        if tensor.name not in source.weights:
            found.append(f"{tensor.name} is wanted by the destination and unknown to the source")
        elif source.weights[tensor.name].shape != tensor.shape:
            shapes = f"{list(source.weights[tensor.name].shape)} in the source and {list(tensor.shape)}"
            found.append(f"{tensor.name} has shape {shapes} in the destination")
    return found + [
        f"{tensor.name} is held by the source and unknown to the destination"
        for tensor in source.weights
        if tensor.name not in destination.weights and tensor.name not in omitted and source.holders(tensor.name)
    ]


def _keys(layout: Layout) -> Callable[[Tensor], Hashable]:
    """A function from tensors to what must be equal for two of them to lie alike."""
    if isinstance(layout, ClassedLayout):
        return layout.alike
    dtypes = _Dtypes(layout)

    def key(tensor: Tensor) -> Hashable:
        holders = layout.holders(tensor.name)
        return tuple((h.piece.box, len(h.piece.offset), h.ranks, dtypes(tensor, h)) for h in holders)

    return key


class _Dtypes:
    """The dtype of the parameter that a holder's piece lies in."""

    def __init__(self, layout: Layout) -> None:
        self._by_role = isinstance(layout, ClassedLayout)
        self._known: dict[Hashable, str] = {}
        self._params = lru_cache(maxsize=64)(layout.params)

    def __call__(self, tensor: Tensor, holder: Holder) -> str:
        key = (tensor.role, tensor.dtype) if self._by_role else (holder.ranks[0], holder.piece.param)
        if key not in self._known:
            params = self._params(holder.ranks[0])
            if holder.piece.param not in params:
                raise PlanError([f"{tensor.name} lies in {holder.piece.param}, which rank {holder.ranks[0]} has not"])
            self._known[key] = params[holder.piece.param].dtype
        return self._known[key]


def _kind(
    source: Layout, destination: Layout, dtypes: tuple[_Dtypes, _Dtypes], members: list[tuple[int, Tensor]]
) -> tuple[Kind, list[str]]:
    tensor = members[0][1]
    have, want = source.holders(tensor.name), destination.holders(tensor.name)
    source_dtypes = tuple(dtypes[0](tensor, h) for h in have)
    destination_dtypes = tuple(dtypes[1](tensor, h) for h in want)
    wrong = _source_problems(have, source_dtypes)
    if not want and have and tensor.name not in getattr(destination, "omitted", ()):
        wrong.append("is held by the source and has no place in the destination")
    needs = [] if wrong else list(_needs(have, want, source_dtypes, destination_dtypes, wrong))
    kind = Kind(tuple(members), tuple(needs), source_dtypes, destination_dtypes)
    return kind, [f"{one.name} {text}" for _, one in members for text in wrong]


def _source_problems(have: Sequence[Holder], source_dtypes: Sequence[str]) -> list[str]:
    """Sources in one parameter must be equal or disjoint (copies in several parameters, as of tied embeddings, may be
    cut differently)."""
    if len(set(source_dtypes)) > 1:
        return [f"is held by the source as {' and as '.join(sorted(set(source_dtypes)))}"]
    boxes: dict[str, set[Box]] = defaultdict(set)
    for holder in have:
        boxes[holder.piece.param].add(holder.piece.box)
    for param, distinct in boxes.items():
        clash = overlapping(list(distinct))
        if clash is not None:
            return [f"has two sources in {param} that overlap unequally: {clash[0]} and {clash[1]}"]
    return []


def _needs(
    have: Sequence[Holder],
    want: Sequence[Holder],
    source_dtypes: Sequence[str],
    destination_dtypes: Sequence[str],
    wrong: list[str],
) -> Iterable[Need]:
    sources = _source_cells(have)
    for box, needers, targets in _wanted(want):
        found = 0
        for cell, entries in sources:
            common = box.intersect(cell)
            if common is None:
                continue
            found += common.size
            holders = tuple(entries)
            dtype = source_dtypes[entries[holders[0]]]
            ordered = _by_dtype(targets, destination_dtypes, dtype)
            first = destination_dtypes[ordered[0]]
            others = {destination_dtypes[t] for t in ordered} - {first}
            if others and first != dtype and ITEM_BYTES[first] <= ITEM_BYTES[dtype]:
                wrong.append(f"is {dtype} and rank {needers[0]} needs it both as {first} and as {', '.join(others)}")
            wire = dtype if ITEM_BYTES[dtype] <= ITEM_BYTES[first] else first
            yield Need(common, needers, ordered, holders, entries, wire, first == dtype)
        if found != box.size:
            wrong.append(f"has no source for {box.size - found} elements of {box}, which rank {needers[0]} needs")


def _by_dtype(targets: Iterable[int], dtypes: Sequence[str], wanted: str) -> tuple[int, ...]:
    """Those of the wanted dtype first, then the wider: from the first of them, the others follow without loss."""
    return tuple(sorted(targets, key=lambda t: (dtypes[t] != wanted, -ITEM_BYTES[dtypes[t]], t)))


def _source_cells(have: Sequence[Holder]) -> list[tuple[Box, dict[int, int]]]:
    """Disjoint cells, each with its ranks in ascending order and the holder that each rank has it in."""
    cells = []
    for cell in refine([h.piece.box for h in have]) if have else ():
        entries: dict[int, int] = {}
        for index, holder in enumerate(have):
            if holder.piece.box.contains(cell):
                for rank in holder.ranks:
                    entries.setdefault(rank, index)
        cells.append((cell, dict(sorted(entries.items()))))
    return cells


def _wanted(want: Sequence[Holder]) -> Iterable[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """Boxes with the ranks that want just them, and the holders that contain them: what a rank wants twice is one."""
    for indices, ranks in _profiles(tuple(holder.ranks for holder in want)):
        for cell in refine([want[i].piece.box for i in indices]):
            yield cell, ranks, tuple(i for i in indices if want[i].piece.box.contains(cell))


@lru_cache(maxsize=1024)
def _profiles(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The ranks that are in just the same groups, with the indices of those groups."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for index, ranks in enumerate(groups):
        for rank in ranks:
            by_rank[rank].append(index)
    profiles: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, own in by_rank.items():
        profiles[tuple(own)].append(rank)
    return tuple((indices, tuple(sorted(ranks))) for indices, ranks in profiles.items())
