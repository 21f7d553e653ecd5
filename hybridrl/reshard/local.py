"""What concerns one rank's own parameters: proof that each element is covered once, padding, and aliases."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from hybridrl.models.weights import ITEM_BYTES, Box, Param, Piece
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


def find_aliases(source: Shard, destination: Shard, *, zero_padding: bool = False) -> tuple[Alias, ...]:
    """Destination parameters that are a source parameter of the same rank byte for byte.

    Shape, dtype and pieces are equal. Where the pieces leave padding, which a destination has zero, the source must
    promise the same (`zero_padding`): else the two sides may differ in it.

    A parameter that is nothing but padding on this rank is no alias of anything: no tensor says which parameter of the
    other side is its counterpart, and equal zeros in another one would tie two parameters that have nothing in common.
    It costs no transfer; the destination's is set to zero.
    """
    origins = {content: param.name for param, content, _ in _contents(source, zero_padding)}
    return tuple(
        Alias(origins[content], param.name, param.nbytes, padding * ITEM_BYTES[param.dtype])
        for param, content, padding in _contents(destination, zero_padding)
        if content in origins
    )


def _contents(shard: Shard, zero_padding: bool) -> Iterator[tuple[Param, Hashable, int]]:
    """Parameters whose bytes their pieces decide, all that decides them, and the number of elements of padding."""
    params, pieces = shard
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.param].append(piece)
    for name, own in found.items():
        param = params[name]
        padding = param.size - sum(piece.box.size for piece in own)
        if zero_padding or not padding:
            places = frozenset((p.tensor, p.box, p.offset) for p in own)
            yield param, (param.shape, param.dtype, places), padding
