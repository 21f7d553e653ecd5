"""Pages of CUDA's virtual memory, through the driver's own library: reserved addresses, and memory mapped into them.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#virtual-memory-management
"""

import ctypes
from functools import cache
from typing import Any, Protocol

import torch

_OUT_OF_MEMORY = 2
_PINNED = 1
_ON_DEVICE = 1
_READ_WRITE = 3


class DriverError(RuntimeError):
    """CUDA's driver refused a call."""


class Driver(Protocol):
    """What is used of the driver. Addresses, sizes and handles are integers."""

    def granularity(self, device: int) -> int:
        """Bytes that memory comes in."""

    def reserve(self, nbytes: int) -> int:
        """Address space; its address."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives address space back."""

    def create(self, nbytes: int, device: int) -> int:
        """Memory; its handle. Raises MemoryError where there is none left."""

    def destroy(self, handle: int) -> None:
        """Gives memory back, once it is mapped nowhere."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Puts memory at an address. Raises MemoryError where the device has no room to note it."""

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets the device read and write a range, all of which is mapped. Raises MemoryError as `map` does."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes memory from an address. Nothing that runs may use it."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))


class CudaDriver:
    """libcuda. Raises OSError where it is not installed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def granularity(self, device: int) -> int:
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(device)), 0)
        return found.value

    def reserve(self, nbytes: int) -> int:
        found, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemAddressReserve", ctypes.byref(found), size, ctypes.c_size_t(0), none, none)
        return found.value

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def create(self, nbytes: int, device: int) -> int:
        found, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        self._call("cuMemCreate", ctypes.byref(found), size, ctypes.byref(_properties(device)), ctypes.c_uint64(0))
        return found.value

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0))

    def allow(self, address: int, nbytes: int, device: int) -> None:
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if not status:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        told = f"{name}: {text.value.decode() if text.value else f'error {status}'}"
        raise MemoryError(told) if status == _OUT_OF_MEMORY else DriverError(told)


class Pool:
    """Memory of one device that regions have given back and may take again, a page each.

    So what one side of a switch gives back becomes the other's without a way through the driver, which would have to
    clear it. `trim` ends that.
    """

    def __init__(self, driver: Driver, device: int, page_bytes: int) -> None:
        self.driver, self.device, self.page_bytes = driver, device, page_bytes
        self._spare: list[int] = []

    def take(self, count: int) -> list[int]:
        """Handles of so many pages. Raises MemoryError, with nothing taken, where there are not enough."""
        found: list[int] = []
        try:
            while len(found) < count:
                found.append(self._spare.pop() if self._spare else self._create())
        except MemoryError:
            self.give(found)
            raise
        return found

    def give(self, handles: list[int]) -> None:
        """Takes pages back, which are mapped nowhere."""
        self._spare += handles

    def trim(self) -> None:
        """Gives the driver all that waits."""
        while self._spare:
            self.driver.destroy(self._spare.pop())

    def _create(self) -> int:
        try:
            return self.driver.create(self.page_bytes, self.device)
        except MemoryError:
            torch.cuda.empty_cache()  # what torch's allocator keeps for itself
            return self.driver.create(self.page_bytes, self.device)


@cache
def pool(device: int) -> Pool:
    """The device's own, for all regions of this process."""
    driver = CudaDriver()
    return Pool(driver, device, driver.granularity(device))


class _Interface:
    """Address space as torch takes it over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaPages:
    """Address space on a CUDA device with pages of the driver's granularity, 2 MiB; see `region.Pages`.

    `source` is the pool that pages come from, None for the device's own.
    """

    def __init__(self, nbytes: int, device: torch.device, source: Pool | None = None) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._pool = source or pool(index)
        self.page_bytes = self._pool.page_bytes
        self._nbytes = -(-nbytes // self.page_bytes) * self.page_bytes
        self._address = self._pool.driver.reserve(self._nbytes)
        self._handles: dict[int, int] = {}
        self.take(0, self.page_bytes)  # torch asks the driver whose the address is: it must be somebody's
        self.base = self._tensor()
        self.give(0, self.page_bytes)

    def take(self, start: int, stop: int) -> None:
        driver, places = self._pool.driver, range(start, stop, self.page_bytes)
        handles = self._pool.take(len(places))
        mapped: dict[int, int] = {}
        try:
            for place, handle in zip(places, handles, strict=True):
                driver.map(self._address + place, self.page_bytes, handle)
                mapped[place] = handle
            driver.allow(self._address + start, stop - start, self._pool.device)
        except (MemoryError, DriverError):
            for place in mapped:
                driver.unmap(self._address + place, self.page_bytes)
            self._pool.give(handles)
            raise
        self._handles |= mapped

    def give(self, start: int, stop: int) -> None:
        self._wait()
        places = range(start, stop, self.page_bytes)
        for place in places:
            self._pool.driver.unmap(self._address + place, self.page_bytes)
        self._pool.give([self._handles.pop(place) for place in places])

    def trim(self) -> None:
        self._pool.trim()

    def close(self) -> None:
        for place in list(self._handles):
            self.give(place, place + self.page_bytes)
        self.trim()
        self._pool.driver.free(self._address, self._nbytes)

    def _tensor(self) -> torch.Tensor:
        return torch.as_tensor(_Interface(self._address, self._nbytes), device=self._device)

    def _wait(self) -> None:
        """Until nothing that was launched on this stream uses the pages: to unmap them is no work of a stream, but done
        at once. Who used them on another stream has waited for that one."""
        torch.cuda.current_stream(self._device).synchronize()
