"""What ranks run to test one copy of the weights: there and back, on pages that poison what they held."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.memory.region import Region, region_bytes
from hybridrl.memory.single import SingleWeights, Where
from hybridrl.models.families import weight_map
from hybridrl.reshard.aliasing import adopt_data
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.storages import Tensors
from tests.distributed.reshard_runs import SPECS, codes, engine_layout, same_bits, shard, training_layout, write_shard

POISON = 0xFF  # NaN, in all floating dtypes


class PoisonPages:
    """Small pages of ordinary memory. What is read before it was written, or after it was given back, is NaN."""

    page_bytes = 64

    def __init__(self, nbytes: int) -> None:
        whole = -(-nbytes // self.page_bytes) * self.page_bytes
        self.base = torch.full((whole,), POISON, dtype=torch.uint8)

    def take(self, start: int, stop: int) -> None:
        assert bool((self.base[start:stop] == POISON).all()), "bytes were written without a page under them"

    def give(self, start: int, stop: int) -> None:
        self.base[start:stop] = POISON

    def trim(self) -> None: ...

    def close(self) -> None: ...


def poison_region(nbytes: int, device: torch.device) -> Region:
    """A region of such pages."""
    return Region(nbytes, device, pages=PoisonPages(nbytes))


def place(region: Region, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes in the region, which has all of its pages."""
    region.commit()
    return {name: region.take(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def make_single(
    source: Layout, destination: Layout, bucket_bytes: int, make_region: Any = poison_region
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], SingleWeights]:
    """The trainer's tensors in a region, the engine's, and the one copy of the weights that is to be in both."""
    rank = dist.get_rank()
    empty = shard(source, rank, None)
    region = make_region(region_bytes(t.nbytes for t in empty.values()), torch.device("cpu"))
    trained, served = place(region, empty), shard(destination, rank, None)
    single = SingleWeights(
        source,
        trained,
        region,
        destination,
        served,
        rank,
        adopt=adopt_data(served),
        bucket_bytes=bucket_bytes,
        make_region=make_region,
    )
    return trained, served, single


def there_and_back(spec: str, pairs: Sequence[tuple[str, str]], bucket_bytes: int) -> list[dict[str, Any]]:
    """Three times there and back for each pair, with other weights each time, all of which arrive bit for bit.

    Returns, for each pair, the peak of both ways and what it may be without buckets, in bytes.
    """
    rank, weights = dist.get_rank(), weight_map(SPECS[spec])
    versions = [codes(weights, version) for version in range(3)]
    told = []
    for train, engine in pairs:
        source, destination = training_layout(weights, train), engine_layout(weights, engine)
        trained, served, single = make_single(source, destination, bucket_bytes)
        ours, theirs = single.region, single.engine_region
        addresses = [t.data_ptr() for t in (*trained.values(), *served.values())]
        peaks = []
        for version, tensors in enumerate(versions):
            where = (train, engine, version)
            write_shard(source, rank, tensors, trained)
            before = {name: value.clone() for name, value in trained.items()}
            peaks.append(single.to_rollout(version)["sync/peak_bytes"])
            assert single.where is Where.ROLLOUT
            assert same_bits(served, shard(destination, rank, tensors)), (*where, "the engine has other weights")
            shared = ours.committed_bytes
            assert shared <= single.aliased_bytes + 2 * ours.page_bytes * len(served), (*where, "not given back")
            assert theirs.committed_bytes == theirs.nbytes
            peaks.append(single.to_training()["sync/peak_bytes"])
            assert same_bits(trained, before), (*where, "the trainer has other weights")
            assert (ours.committed_bytes, theirs.committed_bytes) == (ours.nbytes, 0)
        assert addresses == [t.data_ptr() for t in (*trained.values(), *served.values())]
        single.close()
        told.append({"pair": (train, engine), "peak": max(peaks), "larger": max(ours.nbytes, theirs.nbytes + shared)})
    return told
