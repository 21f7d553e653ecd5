"""CUDA's pages over a stand-in for the driver: what is mapped where, what is taken again, what is given back."""

from typing import Any

import pytest
import torch

from hybridrl.memory import cuda_pages
from hybridrl.memory.cuda_pages import CudaPages, DriverError, Pool
from hybridrl.memory.region import Region, RegionError

PAGE = 2**21


class FakeDriver:
    """Keeps what the driver would, and refuses what it would."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.made = 0
        self.live: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.allowed: set[int] = set()
        self.places: int | None = None
        """How many pages can be mapped at a time; None sets no limit."""
        self.refuses = False
        """Whether it lets nobody use what is mapped."""
        self.spaces: dict[int, int] = {}

    def granularity(self, device: int) -> int:
        return PAGE

    def reserve(self, nbytes: int) -> int:
        address = 2**40 + 2**36 * len(self.spaces)
        self.spaces[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.spaces.pop(address) == nbytes
        assert not any(address <= place < address + nbytes for place in self.mapped)

    def create(self, nbytes: int, device: int) -> int:
        assert nbytes == PAGE
        if len(self.live) == self.limit:
            raise MemoryError("cuMemCreate: out of memory")
        self.made += 1
        self.live.add(self.made)
        return self.made

    def destroy(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        self.live.remove(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        assert nbytes == PAGE
        assert handle in self.live
        assert handle not in self.mapped.values()
        assert any(a <= address < a + n for a, n in self.spaces.items())
        if len(self.mapped) == self.places:
            raise MemoryError("cuMemMap: out of memory")
        assert self.mapped.setdefault(address, handle) == handle

    def allow(self, address: int, nbytes: int, device: int) -> None:
        assert nbytes % PAGE == 0
        if self.refuses:
            raise DriverError("cuMemSetAccess: not permitted")
        self.allowed |= set(range(address, address + nbytes, PAGE))
        assert self.allowed <= self.mapped.keys()

    def unmap(self, address: int, nbytes: int) -> None:
        assert nbytes == PAGE
        del self.mapped[address]
        self.allowed.discard(address)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for torch's side of CUDA; a waiting for the stream adds an entry."""
    told: list[int] = []

    class Stream:
        def synchronize(self) -> None:
            told.append(len(told))

    def tensor(pages: CudaPages) -> Any:
        class Base:
            def data_ptr(self) -> int:
                return pages._address

            def numel(self) -> int:
                return pages._nbytes

        return Base()

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(CudaPages, "_tensor", tensor)
    return told


def make(driver: FakeDriver, pool: Pool, nbytes: int) -> Region:
    return Region(nbytes, pages=CudaPages(nbytes, torch.device("cuda", 0), pool))


def test_pages_that_one_region_gives_back_are_the_next_ones_of_another(waits: list[int]) -> None:
    driver = FakeDriver(limit=6)
    pool = Pool(driver, 0, PAGE)
    one, other = make(driver, pool, 5 * PAGE - 3), make(driver, pool, 4 * PAGE)
    assert (one.nbytes, one.page_bytes) == (5 * PAGE, PAGE)
    assert driver.mapped == {}
    one.commit()
    assert driver.allowed == set(range(one.address, one.address + one.nbytes, PAGE))
    for page in range(4):  # there and back, with one page more than the larger side
        other.commit(page * PAGE, (page + 1) * PAGE)
        one.release(page * PAGE, (page + 1) * PAGE)
    assert driver.made <= 6
    assert set(driver.mapped) == {one.address + 4 * PAGE, *(other.address + page * PAGE for page in range(4))}
    one.trim()
    assert len(driver.live) == 5
    one.close()
    other.close()
    assert driver.live == set()
    assert driver.spaces == driver.mapped == {}


def test_pages_are_taken_away_only_when_the_stream_has_done_its_work(waits: list[int]) -> None:
    driver = FakeDriver(limit=9)
    region = make(driver, Pool(driver, 0, PAGE), 3 * PAGE)
    before = len(waits)
    region.commit()
    assert len(waits) == before
    region.release(0, 2 * PAGE)
    assert len(waits) == before + 1


def test_where_memory_ends_nothing_is_taken_and_what_torch_keeps_is_asked_for_first(
    waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(limit=2)
    region = make(driver, Pool(driver, 0, PAGE), 4 * PAGE)
    with pytest.raises(RegionError, match=r"no memory for .* bytes more .*: cuMemCreate: out of memory"):
        region.commit()
    assert driver.mapped == {}
    assert region.committed_bytes == 0
    region.commit(0, 2 * PAGE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(driver, "limit", 3))
    region.commit(2 * PAGE, 3 * PAGE)
    assert region.committed_bytes == 3 * PAGE


@pytest.mark.parametrize("places", [2, None])
def test_pages_that_cannot_be_mapped_or_used_are_all_given_back(waits: list[int], places: int | None) -> None:
    driver = FakeDriver(limit=9)
    region = make(driver, Pool(driver, 0, PAGE), 4 * PAGE)
    region.commit(0, PAGE)
    held = dict(driver.mapped)
    driver.places, driver.refuses = places, places is None
    with pytest.raises(RegionError if places else DriverError):
        region.commit()
    assert driver.mapped == held
    assert region.committed_bytes == PAGE
    driver.places, driver.refuses = None, False
    region.commit()
    assert driver.allowed == driver.mapped.keys()
    assert len(set(driver.mapped.values())) == 4


def test_properties_lie_as_the_driver_reads_them() -> None:
    """CUmemAllocationProp and CUmemAccessDesc of cuda.h, on a machine of 64 bits."""
    import ctypes

    assert ctypes.sizeof(cuda_pages._Properties) == 32
    assert cuda_pages._Properties.location.offset == 8
    assert cuda_pages._Properties.windows.offset == 16
    assert cuda_pages._Properties.flags.offset == 24
    assert ctypes.sizeof(cuda_pages._Access) == 12
