"""What concerns one rank's own parameters: proof that each element is covered once, padding, and aliases."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hybridrl.models.weights import Box, Param, Piece
from hybridrl.reshard.boxes import complement, overlapping
from hybridrl.reshard.plan import Alias, View
from hybridrl.reshard.survey import PlanError

Shard = tuple[Mapping[str, Param], Sequence[Piece]]
"""A rank's parameters and the pieces that lie in them."""


def find_fills(rank: int, shard: Shard) -> tuple[View, ...]:
    """Elements of the parameters that no piece covers.

    Raises PlanError where a piece lies in no parameter or outside of it, or where two pieces share an element: so each
    element is covered exactly once, by a piece or by a fill.
    """
    params, pieces = shard
    boxes, problems = _boxes_by_param(rank, shard)
    fills: list[View] = []
    for name, param in params.items():
        own = boxes[name]
        clash = overlapping(own)
        if clash is not None:
            names = sorted({p.tensor for p in pieces if p.param == name and _place(p) in clash})
            problems.append(f"{' and '.join(names)}: both lie in {name} of rank {rank}, at {clash[0]} and {clash[1]}")
        elif sum(box.size for box in own) != param.size:
            rest = complement(Box.whole(param.shape), own)
            fills += [View(name, box.start, box.shape, param.dtype) for box in rest]
    if problems:
        raise PlanError(problems)
    return tuple(fills)


def _boxes_by_param(rank: int, shard: Shard) -> tuple[dict[str, list[Box]], list[str]]:
    params, pieces = shard
    boxes: dict[str, list[Box]] = defaultdict(list)
    problems = []
    for piece in pieces:
        if piece.param not in params:
            problems.append(f"{piece.tensor} lies in {piece.param}, which rank {rank} does not have")
        elif len(piece.offset) != len(params[piece.param].shape) or not Box.whole(params[piece.param].shape).contains(
            _place(piece)
        ):
            shape = list(params[piece.param].shape)
            problems.append(f"{piece.tensor} lies at {_place(piece)} of {piece.param}, outside its shape {shape}")
        else:
            boxes[piece.param].append(_place(piece))
    return boxes, problems


def _place(piece: Piece) -> Box:
    """The piece's box in its parameter."""
    return Box(piece.offset, tuple(o + n for o, n in zip(piece.offset, piece.extent, strict=True)))


def find_aliases(source: Shard, destination: Shard) -> tuple[Alias, ...]:
    """Destination parameters that are a source parameter of the same rank byte for byte.

    Shape, dtype and pieces are equal and the pieces cover the whole parameter: where there is padding, the two sides
    may differ in it.
    """
    origins = {content: param.name for param, content in _contents(source)}
    return tuple(
        Alias(origins[content], param.name, param.nbytes)
        for param, content in _contents(destination)
        if content in origins
    )


def _contents(shard: Shard) -> list[tuple[Param, tuple[object, ...]]]:
    """Every parameter that its pieces cover, with all that decides what its bytes are."""
    params, pieces = shard
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.param].append(piece)
    return [
        (params[name], (params[name].shape, params[name].dtype, frozenset((p.tensor, p.box, p.offset) for p in own)))
        for name, own in found.items()
        if sum(piece.box.size for piece in own) == params[name].size
    ]
