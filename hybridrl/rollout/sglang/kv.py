"""The KV pool of a model runner, given back and taken again: for eager execution only (see `OwnStorages`)."""

from typing import Any

import torch

from hybridrl.rollout.parameters import OwnStorages
from hybridrl.rollout.sglang import internals as sg


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
        self._storages = OwnStorages(self._buffers)

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
