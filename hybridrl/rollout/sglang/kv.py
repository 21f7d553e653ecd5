"""Memory of tensors given back and taken again: the KV pool of a model runner, and parameters.

`UntypedStorage.resize_(0)` frees the storage under every view of it at once; resizing it back allocates anew, at
another address and with undefined contents. So this is for eager execution only: captured CUDA graphs would go on to
use the old addresses.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hybridrl.rollout.sglang import internals as sg


class Storages:
    """The storages of some tensors, each once. `free` and `restore` may be called in any state, and repeat nothing."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]

    @property
    def nbytes(self) -> int:
        """Bytes when whole."""
        return sum(nbytes for _, nbytes in self._storages)

    @property
    def freed(self) -> bool:
        return any(nbytes and not storage.nbytes() for storage, nbytes in self._storages)

    def free(self) -> None:
        """Gives the memory back to the allocator."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Takes memory of the same sizes; its contents are undefined."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)


class KvMemory:
    """The KV pool of one rank. Raises ValueError for a pool of a kind that it was not written for."""

    def __init__(self, model_runner: Any) -> None:
        self._pool = model_runner.token_to_kv_pool
        if type(self._pool) is not sg.MHATokenToKVPool:
            raise ValueError(
                f"the KV pool is a {type(self._pool).__name__}; sleep can free a MHATokenToKVPool only: leave out the "
                "server_args that chose another, or take rollout.sglang.hosting=subprocess"
            )
        self._buffers = [*self._pool.k_buffer, *self._pool.v_buffer]
        self._storages = Storages(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, freed or not."""
        return self._storages.nbytes

    def free(self) -> None:
        """Gives the pool's memory back. No request may hold any of it."""
        self._storages.free()

    def restore(self) -> None:
        """Takes the pool's memory again, and refreshes SGLang's own lists of its addresses."""
        if not self._storages.freed:
            return
        self._storages.restore()
        with torch.no_grad():
            for buffer in self._buffers:
                buffer[: self._pool.page_size].zero_()  # the page that padding tokens are written to
        self._pool._init_data_ptrs_and_strides()
