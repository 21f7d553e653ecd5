"""An engine's live parameters: compared with its layout, moved into another's storage, given back and taken again."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from hybridrl.reshard.layout import Layout
from hybridrl.rollout.engine import EngineStateError


def by_layout(tensors: Mapping[str, Tensor], layout: Layout, rank: int, *, owner: str) -> dict[str, Tensor]:
    """The engine's tensors in the layout's order; ValueError lists every name, shape and dtype that differs."""
    expected = {name: f"{p.dtype} {list(p.shape)}" for name, p in layout.params(rank).items()}
    found = {name: _kind(tensor) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {found.get(name, 'absent')} in {owner}, {expected.get(name, 'absent')} in the layout"
        for name in expected | found
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        raise ValueError(f"{owner} and its layout disagree: {'; '.join(wrong)}")
    return {name: tensors[name] for name in expected}


def adopt(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Points the parameters of these names at the tensors' storage.

    Raises ValueError for shapes, dtypes or devices that differ, before any parameter is changed.
    """
    wrong = []
    for name, tensor in tensors.items():
        own = parameters.get(name)
        if own is None:
            wrong.append(f"{name} is no parameter of the engine")
        elif (own.shape, own.dtype, own.device) != (tensor.shape, tensor.dtype, tensor.device):
            wrong.append(
                f"{name} is {_kind(own)} on {own.device} in the engine, {_kind(tensor)} on {tensor.device} is given"
            )
        elif not own.is_contiguous():
            wrong.append(f"{name} has strides {own.stride()} in the engine, which a plain tensor has not")
    if wrong:
        raise ValueError(f"the engine cannot take this storage: {'; '.join(wrong)}")
    for name, tensor in tensors.items():
        parameters[name].data = tensor


class OwnStorages:
    """The storages of some tensors, each once. `free` and `restore` may be called in any state, and repeat nothing.

    `UntypedStorage.resize_(0)` frees a storage under every view of it at once; resizing it back allocates anew, at
    another address and with undefined contents. So this is for eager execution only: captured CUDA graphs would go on
    to use the old addresses.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.numel()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]

    @property
    def nbytes(self) -> int:
        """Bytes when whole."""
        return sum(nbytes for _, nbytes in self._storages)

    @property
    def freed(self) -> bool:
        """Whether any is given back."""
        return any(nbytes and not storage.nbytes() for storage, nbytes in self._storages)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Forgets all but these tensors' storages, whether they are given back or not."""
        wanted = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._storages = [(storage, nbytes) for storage, nbytes in self._storages if storage._cdata in wanted]

    def free(self) -> None:
        """Gives the memory back to the allocator."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Takes memory of the same sizes; its contents are undefined."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)


class EngineWeights:
    """The parameters that an engine computes with: its own, and those that lie in another's storage.

    Args:
        tensors: live, by the layout's names.
        release: whether `free` gives the memory of its own back. What is another's is left alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, release: bool) -> None:
        self._tensors = tensors
        self._own = OwnStorages(tensors.values() if release else ())
        self._adopted: set[str] = set()

    def tensors(self) -> Mapping[str, Tensor]:
        """All of them. Raises EngineStateError where `free` has given any back."""
        if self._own.freed:
            raise EngineStateError("the engine's weights are released: call wake before parameters")
        return self._tensors

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See `SharingEngine.adopt`."""
        adopt(self._tensors, tensors)
        self._adopted |= tensors.keys()
        self._own.keep(tensor for name, tensor in self._tensors.items() if name not in self._adopted)

    def free(self) -> None:
        """Gives back what may be."""
        self._own.free()

    def restore(self) -> None:
        """Takes it again, unless it is there; its contents are undefined."""
        self._own.restore()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
