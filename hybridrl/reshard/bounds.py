"""What a reshard cannot do without, and what it costs the usual way: the lower bound and the gather baseline."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.boxes import refine
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.survey import Kind


def lower_bound(kinds: Sequence[Kind], world: int) -> npt.NDArray[np.int64]:
    """Bytes that each rank must receive, shape (world,): the union of what it needs without what it has.

    An element counts once, however often the rank needs it, in the narrower of its two dtypes. Replicas of a source
    make no difference: a rank either has an element or not.
    """
    bound = np.zeros(world, np.int64)
    for kind in kinds:
        for need in kind.needs:
            lacking = [rank for rank in need.needers if rank not in need.entries]
            bound[lacking] += len(kind.tensors) * need.nbytes
    return bound


def gather_bytes(source: Layout, kinds: Sequence[Kind], world: int) -> npt.NDArray[np.int64]:
    """Bytes that each rank receives where every rank rebuilds every tensor whole and keeps its slice, shape (world,).

    The whole model in the source's dtypes, without what the rank has itself.
    """
    received = np.zeros(world, np.int64)
    for kind in kinds:
        tensor = kind.tensors[0][1]
        holders = source.holders(tensor.name)
        if not holders:
            continue
        item = ITEM_BYTES[kind.source_dtypes[0]]
        own: dict[int, int] = defaultdict(int)
        for cell in refine([holder.piece.box for holder in holders]):
            for rank in {rank for h in holders if h.piece.box.contains(cell) for rank in h.ranks}:
                own[rank] += cell.size
        received += len(kind.tensors) * tensor.size * item
        for rank, size in own.items():
            received[rank] -= len(kind.tensors) * size * item
    return received
