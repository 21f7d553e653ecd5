"""A loan: the copy in the arena of what is still on the device, for somebody who writes it to disk meanwhile."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor


class Loan:
    """Copies of whole storages; they stay as they are until `end`, in any thread.

    Args:
        copies: a storage, and a uint8 tensor of as many bytes that holds what it holds.
    """

    def __init__(self, copies: Iterable[tuple[torch.UntypedStorage, Tensor]]) -> None:
        self._copies = {storage._cdata: copy for storage, copy in copies}
        self._ended = threading.Event()

    def of(self, tensor: Tensor) -> Tensor | None:
        """The copy of a tensor, of its shape, strides and dtype; None for one that was not lent."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return None
        same = copy.view(tensor.dtype)
        start = int(same.storage_offset() + tensor.storage_offset())
        return same.as_strided(tensor.shape, tensor.stride(), start)

    def end(self) -> None:
        """The copies are not read any more. More than once is as once."""
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()
