"""The golden path: whole tensors, one after another, gathered from any layout and written into any other.

It is slow, obvious and bit-exact, and the fast paths are compared with it. Bytes are moved, never numbers, so that
-0.0 and NaN payloads survive. What is to be moved follows from layouts alone, never from flags on parameters. Every
rank of the `torch.distributed` world must call these functions together; without one, a world of one rank is assumed.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridrl.models.weights import ITEM_BYTES, Box, Piece, Tensor
from hybridrl.reshard.golden_checks import (
    Params,
    Sources,
    agree,
    dtype_problems,
    pair_problems,
    sharing_problems,
    storage_problems,
)
from hybridrl.reshard.layout import Layout

BUCKET_BYTES = 256 * 1024 * 1024
ALIGNMENT = 8
"""Boxes begin at multiples of this in a bucket, so that each can be viewed in its own dtype."""


class _Part(NamedTuple):
    """A box of a tensor that one rank sends; no larger than a bucket unless it is a single row."""

    tensor: Tensor
    piece: Piece
    owner: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = self.piece.box.size * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def gather(
    layout: Layout,
    params: Params,
    rank: int,
    names: Iterable[str] | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    to: int | None = None,
) -> Iterator[tuple[Tensor, torch.Tensor]]:
    """Yields whole tensors in the parameters' dtype, in the given order, on every rank or only on rank `to`.

    Every rank must run the iterator to its end. Beside its parameters a rank holds at most a bucket and one tensor, if
    the caller lets go of each tensor (`del`) before it asks for the next.

    Args:
        layout: where the tensors' pieces are.
        params: this rank's parameters by the layout's names.
        rank: this rank of the world.
        names: tensors to gather, None for all.
        bucket_bytes: bytes in flight at once; a single row of a tensor may be more.
        to: the only rank that gets tensors; None for all.

    Raises WeightError on every rank, before anything is sent, where parameters do not fit the layout, a name is
    unknown, or the ranks' pieces do not make up a tensor.
    """
    wanted = [t.name for t in layout.weights] if names is None else list(names)
    agree("weights cannot be gathered", gather_problems(layout, params, rank, wanted))
    return stream(layout, params, rank, wanted, bucket_bytes=bucket_bytes, to=to)


def gather_problems(layout: Layout, params: Params, rank: int, names: Iterable[str]) -> list[str]:
    """What `gather` raises: why these tensors could not be put together from the ranks' parameters."""
    sources, found = Sources(layout), storage_problems(layout, params, rank)
    for name in names:
        known = name in layout.weights
        found += sources.problems(layout.weights[name]) if known else [f"tensor {name} is unknown to the layout"]
    return found


def stream(
    layout: Layout, params: Params, rank: int, names: Iterable[str], *, bucket_bytes: int, to: int | None
) -> Iterator[tuple[Tensor, torch.Tensor]]:
    """`gather` without its checks, for callers that made them already on every rank."""
    sources = Sources(layout)
    parts = (part for name in names for part in _parts(sources, layout.weights[name], bucket_bytes))
    return _stream(params, rank, _buckets(parts, bucket_bytes), to)


def golden_sync(
    source: Layout,
    source_params: Params,
    destination: Layout,
    destination_params: Params,
    rank: int,
    *,
    convert: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Writes the source's weights into the destination's parameters in place, and zeroes their padding.

    `convert` allows a destination of another dtype. The two sides must not share storage.

    Raises WeightError on every rank, before anything is sent or written, where parameters do not fit their layout,
    tensors of the two layouts differ, or dtypes differ without `convert`.
    """
    problems = storage_problems(source, source_params, rank)
    problems += storage_problems(destination, destination_params, rank)
    problems += pair_problems(source, destination)
    problems += sharing_problems(source_params, destination_params)
    pieces = destination.pieces(rank) if rank in destination.ranks else ()
    if not problems and not convert:
        problems += dtype_problems(source, pieces, destination_params)
    agree("weights cannot be synchronised", problems)
    zero_padding(pieces, destination_params)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for tensor, value in gather(source, source_params, rank, bucket_bytes=bucket_bytes):
        for piece in by_tensor.get(tensor.name, ()):
            write_piece(destination_params, piece, value[box_slices(piece.box)])
        del value  # before the next tensor is made


def differing_replicas(layout: Layout, params: Params, rank: int) -> list[str]:
    """Boxes whose copies (over ranks, or tied on one rank) are not bit-equal: a line each, alike on every rank."""
    digests = {
        (p.tensor, str(p.box), p.param): blake2b(_bytes(params[p.param][p.slices]), digest_size=16).hexdigest()
        for p in (layout.pieces(rank) if rank in layout.ranks else ())
    }
    told = [digests]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, digests)
    ranks_by_digest: dict[tuple[str, str], dict[str, list[int]]] = {}
    for holder, some in enumerate(told):
        for (tensor, box, _), digest in some.items():
            ranks_by_digest.setdefault((tensor, box), {}).setdefault(digest, []).append(holder)
    return [
        f"tensor {tensor}{box} differs between ranks " + " and ".join(map(str, groups.values()))
        for (tensor, box), groups in sorted(ranks_by_digest.items())
        if len(groups) > 1
    ]


def zero_padding(pieces: Iterable[Piece], params: Params) -> None:
    """Zeroes each parameter that the pieces do not cover wholly. The pieces are to be written after it."""
    covered = dict.fromkeys(params, 0)
    for piece in pieces:
        covered[piece.param] += piece.box.size
    with torch.no_grad():
        for name, param in params.items():
            if covered[name] < param.numel():
                param.zero_()


def write_piece(params: Params, piece: Piece, value: torch.Tensor) -> None:
    """Copies a box's value to its place, in the parameter's dtype."""
    with torch.no_grad():
        target = params[piece.param][piece.slices]
        target.copy_(value.view(target.shape))


def box_slices(box: Box) -> tuple[slice, ...]:
    """Indexes a whole tensor to a view of the box."""
    return tuple(map(slice, box.start, box.stop))


def _parts(sources: Sources, tensor: Tensor, bucket_bytes: int) -> Iterator[_Part]:
    """The tensor's boxes, cut by rows so that each fits a bucket."""
    for piece, owner in sources.owned(tensor.name):
        dtype = sources.dtype(piece, owner)
        start, stop = piece.box.start[0], piece.box.stop[0]
        row_bytes = piece.box.size // (stop - start) * ITEM_BYTES[dtype]
        step = max(1, (bucket_bytes - ALIGNMENT) // row_bytes)
        at = len(piece.offset) - len(piece.box.start)
        for row in range(start, stop, step):
            offset = (*piece.offset[:at], piece.offset[at] + row - start, *piece.offset[at + 1 :])
            box = piece.box.narrow(0, row, min(row + step, stop))
            yield _Part(tensor, Piece(tensor.name, box, piece.param, offset), owner, getattr(torch, dtype))


def _buckets(parts: Iterable[_Part], bucket_bytes: int) -> Iterator[list[_Part]]:
    bucket: list[_Part] = []
    size = 0
    for part in parts:
        if bucket and size + part.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.nbytes
    if bucket:
        yield bucket


def _stream(
    params: Params, rank: int, buckets: Iterable[list[_Part]], to: int | None
) -> Iterator[tuple[Tensor, torch.Tensor]]:
    """Moves bucket after bucket and puts tensors together; only one is unfinished at any time."""
    device = next(iter(params.values())).device if params else torch.device("cpu")
    whole: torch.Tensor | None = None
    missing = 0
    for bucket in buckets:
        buffers = _exchange(params, rank, bucket, to, device)
        used = dict.fromkeys(buffers, 0)
        for part in bucket if to in (None, rank) else ():
            if whole is None:
                whole, missing = torch.empty(part.tensor.shape, dtype=part.dtype, device=device), part.tensor.size
            whole[box_slices(part.piece.box)].copy_(_view(buffers[part.owner], used[part.owner], part))
            used[part.owner] += part.nbytes
            missing -= part.piece.box.size
            if not missing:
                yield part.tensor, whole
                whole = None
        del buffers  # before the next bucket is made


def _exchange(
    params: Params, rank: int, bucket: list[_Part], to: int | None, device: torch.device
) -> dict[int, torch.Tensor]:
    """By owner, the bytes of its parts: packed by the owner, then sent to everyone or to one."""
    sizes: dict[int, int] = {}
    for part in bucket:
        sizes[part.owner] = sizes.get(part.owner, 0) + part.nbytes
    buffers: dict[int, torch.Tensor] = {}
    for owner, size in sizes.items():
        if rank not in (owner, to) and to is not None:
            continue
        buffers[owner] = torch.empty(size, dtype=torch.uint8, device=device)
        if rank == owner:
            used = 0
            for part in bucket:
                if part.owner == owner:
                    view = _view(buffers[owner], used, part)
                    view.copy_(params[part.piece.param].detach()[part.piece.slices].view(view.shape))
                    used += part.nbytes
        _deliver(buffers[owner], rank, owner, to)
    return buffers


def _view(buffer: torch.Tensor, start: int, part: _Part) -> torch.Tensor:
    size = part.piece.box.size * part.dtype.itemsize
    return buffer[start : start + size].view(part.dtype).view(part.piece.box.shape)


def _deliver(buffer: torch.Tensor, rank: int, owner: int, to: int | None) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1 or owner == to:
        return
    if to is None:
        dist.broadcast(buffer, src=owner)
    elif rank == owner:
        dist.send(buffer, dst=to)
    else:
        dist.recv(buffer, src=owner)


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
