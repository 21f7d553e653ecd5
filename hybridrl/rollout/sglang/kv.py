"""The KV pool of a model runner in a region of memory: given back and taken again, at addresses that stay.

So graphs that were captured over the pool, and SGLang's own lists of its addresses, outlive a sleep.
"""

from typing import Any

import torch

from hybridrl.memory.region import Region, region_bytes
from hybridrl.rollout.sglang import internals as sg


class KvMemory:
    """The KV pool of one rank, which is empty and moves into a region here: keys and values, or MLA's latents.

    Raises ValueError for a pool of a kind that it was not written for.
    """

    def __init__(self, model_runner: Any) -> None:
        self._pool = model_runner.token_to_kv_pool
        self._buffers = _buffers(self._pool)
        gapped = [buffer.stride() for buffer in self._buffers if not buffer.is_contiguous()]
        if gapped:
            raise ValueError(f"the KV pool has buffers with strides {gapped[0]}; only whole ones can be moved")
        shapes = [(buffer.shape, buffer.dtype) for buffer in self._buffers]
        self._nbytes = sum(buffer.nbytes for buffer in self._buffers)
        device = self._buffers[0].device
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)  # before there is another
        self._region = Region(region_bytes(buffer.nbytes for buffer in self._buffers), device)
        for buffer, (shape, dtype) in zip(self._buffers, shapes, strict=True):
            buffer.data = self._region.take(shape, dtype)
        _tell_addresses(self._pool)
        self.restore()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, freed or not."""
        return self._nbytes

    def free(self) -> None:
        """Gives the pool's memory back. No request may hold any of it."""
        if self._region.committed_bytes:
            self._region.release()
            self._region.trim()

    def restore(self) -> None:
        """Takes the pool's memory again. What it holds is undefined, but for the page that padding tokens write to."""
        if self._region.committed_bytes:
            return
        self._region.commit()
        with torch.no_grad():
            for buffer in self._buffers:
                buffer[: self._pool.page_size].zero_()


def _buffers(pool: Any) -> list[torch.Tensor]:
    """All that a pool keeps tokens in; every slot of a buffer is one index of its first dimension."""
    if type(pool) is sg.MHATokenToKVPool:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is sg.MLATokenToKVPool:
        return list(pool.kv_buffer)
    raise ValueError(
        f"the KV pool is a {type(pool).__name__}; sleep can free a MHATokenToKVPool or a MLATokenToKVPool only: leave "
        "out the server_args that chose another"
    )


def _tell_addresses(pool: Any) -> None:
    """Has the pool take down anew where its buffers are."""
    if type(pool) is sg.MHATokenToKVPool:
        pool._init_data_ptrs_and_strides()
    else:
        pool.data_ptrs.copy_(torch.tensor([buffer.data_ptr() for buffer in pool.kv_buffer], dtype=torch.uint64))
