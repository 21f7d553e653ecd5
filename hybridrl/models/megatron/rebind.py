"""Parameters of Megatron's gradient-buffer wrapper in storage of ours."""

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel

Place = Callable[[torch.Size, torch.dtype], torch.Tensor]
"""Gives storage for a tensor of this shape and dtype, whose values do not matter."""


def parameter_bytes(chunks: Sequence[DistributedDataParallel]) -> list[int]:
    """Bytes of each piece of storage that `rebind` asks for."""
    return [slab.nbytes for chunk in chunks for slab in _slabs(chunk)]


@torch.no_grad()
def rebind(chunks: Sequence[DistributedDataParallel], place: Place) -> None:
    """Moves all parameters into storage that `place` gives, with their values; everything else that views them follows.

    With a distributed optimizer the parameters of a buffer are one storage, of which its buckets are views. Must be
    called before the optimizer is made: its shards are views of the parameters.
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is None:
                for parameter in buffer.params:
                    _move(parameter, place)
                continue
            flat = _copy(buffer.param_data, place)
            buffer.param_data = flat
            for bucket in buffer.buckets:
                bucket.param_data = flat[bucket.offset : bucket.offset + bucket.param_data.numel()]
            for parameter in buffer.params:
                start, stop, _ = buffer.param_index_map[parameter]
                parameter.data = flat[start:stop].view(parameter.shape)
        for parameter in _unbuffered(chunk):
            _move(parameter, place)


def _slabs(chunk: DistributedDataParallel) -> Iterator[torch.Tensor]:
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.param_data is None:
            yield from buffer.params
        else:
            yield buffer.param_data
    yield from _unbuffered(chunk)


def _unbuffered(chunk: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Parameters that are not trained."""
    known = {p for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers) for p in buffer.params}
    return [parameter for parameter in chunk.parameters() if parameter not in known]


def _move(parameter: torch.nn.Parameter, place: Place) -> None:
    parameter.data = _copy(parameter.data, place)


def _copy(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    return place(tensor.shape, tensor.dtype).copy_(tensor)
