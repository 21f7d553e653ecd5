"""Regions: pages that come and go under tensors whose addresses stay, counted by the kernel."""

import mmap

import pytest
import torch

from hybridrl.memory.region import ALIGNMENT, Region, RegionError, padded, region_bytes
from tests.memory.kernel import present_bytes

PAGE = mmap.PAGESIZE


def resident(region: Region) -> int:
    """Bytes of the region that the kernel has put down."""
    return present_bytes(region.address, region.nbytes)


def test_only_pages_that_are_written_to_are_there_and_a_release_gives_them_back_at_once() -> None:
    region = Region(100 * PAGE)
    tensor = region.take((100 * PAGE,), torch.uint8)
    assert region.committed_bytes == resident(region) == 0
    region.commit()
    tensor.fill_(7)
    assert region.committed_bytes == resident(region) == 100 * PAGE
    region.release(10 * PAGE, 30 * PAGE)
    region.release(99 * PAGE, 100 * PAGE)
    assert region.committed_bytes == resident(region) == 79 * PAGE
    assert int(tensor[10 * PAGE - 1]) == int(tensor[30 * PAGE]) == 7
    region.commit(20 * PAGE, 40 * PAGE)
    tensor[20 * PAGE : 30 * PAGE] = 3
    assert region.committed_bytes == resident(region) == 89 * PAGE
    assert int(tensor[30 * PAGE]) == 7  # pages that were there stay as they are


def test_tensors_views_and_parameters_keep_their_addresses() -> None:
    region = Region(region_bytes([40_000, 80_000]))
    region.commit()
    weight = torch.nn.Parameter(region.take((100, 100), torch.float32))
    other = region.take((200, 200), torch.bfloat16)
    view, places = weight.detach()[10:20].t(), [weight.data_ptr(), other.data_ptr()]
    assert all((place - region.address) % ALIGNMENT == 0 for place in places)
    for value in (1.0, 2.0, 3.0):
        weight.data.fill_(value)
        other.fill_(-value)
        assert bool((view == value).all())
        region.release()
        region.commit()
        assert [weight.data_ptr(), other.data_ptr()] == places
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    assert bool((view == -0.5).all())  # the kernel's pages are zero; on a GPU they are undefined


def test_one_storage_serves_all_tensors_without_overlap() -> None:
    region = Region(region_bytes([4, 4, 1000]))
    region.commit()
    tensors = [region.take((1,), torch.float32), region.take((), torch.float32), region.take((10, 100), torch.uint8)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(tensor.max()) for tensor in tensors] == [0, 1, 2]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert padded(1) == padded(ALIGNMENT) == ALIGNMENT


@pytest.mark.parametrize(("start", "stop"), [(1, PAGE), (0, PAGE + 1), (-PAGE, PAGE), (PAGE, 0), (0, 5 * PAGE)])
@pytest.mark.parametrize("call", ["commit", "release"])
def test_ranges_that_are_not_whole_pages_of_the_region_are_refused(call: str, start: int, stop: int) -> None:
    region = Region(4 * PAGE)
    region.commit()
    with pytest.raises(RegionError, match=rf"bytes {start} to {stop} of a region of {4 * PAGE}: expected whole pages"):
        getattr(region, call)(start, stop)


def test_a_second_release_is_refused_and_gives_nothing_back() -> None:
    region = Region(4 * PAGE)
    tensor = region.take((4 * PAGE,), torch.uint8)
    region.commit()
    tensor.fill_(9)
    region.release(2 * PAGE, 3 * PAGE)
    with pytest.raises(RegionError, match=f"the page at {2 * PAGE} is not there"):
        region.release()
    assert region.committed_bytes == 3 * PAGE
    assert bool((tensor[: 2 * PAGE] == 9).all())


def test_tensors_on_pages_that_were_given_back_are_told_from_those_that_hold_values() -> None:
    region = Region(4 * PAGE)
    first, second = (region.take((2 * PAGE,), torch.uint8) for _ in range(2))
    region.commit()
    region.release(3 * PAGE, 4 * PAGE)
    region.check(first, "first")
    region.check(second[:PAGE], "the front of second")
    with pytest.raises(RegionError, match="second: 1 of the 2 pages that it lies on have been given back"):
        region.check(second, "second")
    with pytest.raises(RegionError, match=r"stranger lies at 0x.*, outside of the region"):
        region.check(torch.zeros(3), "stranger")


def test_a_tensor_that_does_not_fit_is_refused() -> None:
    region = Region(PAGE)
    region.take((PAGE // 2,), torch.uint8)
    with pytest.raises(RegionError, match=f"a region of {PAGE} bytes has {PAGE // 2} left, and a tensor of"):
        region.take((PAGE // 2 + 1,), torch.uint8)
    assert region.take((PAGE // 2,), torch.uint8).numel() == PAGE // 2


def test_what_the_device_has_no_memory_for_is_refused_with_nothing_taken() -> None:
    class Small:
        page_bytes = 64
        base = torch.zeros(640, dtype=torch.uint8)

        def take(self, start: int, stop: int) -> None:
            if stop > 320:
                raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY")

    region = Region(640, pages=Small())  # type: ignore[arg-type]
    region.commit(0, 128)
    with pytest.raises(RegionError, match="no memory for 512 bytes more of a region that has 128 of 640: CUDA_ERROR"):
        region.commit()
    assert region.committed_bytes == 128


@pytest.mark.parametrize("nbytes", [0, -5])
def test_an_empty_region_is_refused(nbytes: int) -> None:
    with pytest.raises(RegionError, match=f"a region of {nbytes} bytes"):
        Region(nbytes)


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(RegionError, match="no region can be made on meta"):
        Region(1, "meta")


def test_address_space_costs_nothing() -> None:
    region = Region(2**40)
    assert region.nbytes == 2**40
    region.close()
