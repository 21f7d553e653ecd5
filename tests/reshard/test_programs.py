"""Compiled programs on random layouts: any strides and dtypes, in memory that stays and in memory that is paged."""

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hybridrl.memory.region import Region, region_bytes
from hybridrl.models.weights import Param
from hybridrl.reshard.compile import torch_dtype
from hybridrl.reshard.invert import invert_planner
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.paging import Paging
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.schedule import BucketError
from hybridrl.reshard.storages import Tensors
from hybridrl.reshard.survey import PlanError
from tests.reshard.poison import poison_region
from tests.reshard.programs import Programs, like, same, write
from tests.reshard.random_layouts import ListedLayout, layouts, weight_maps

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def reshards(draw: st.DrawFn) -> Planner:
    """Two layouts on equal or overlapping ranks, with small buckets and nodes; or one with itself."""
    weights = draw(weight_maps())
    here, there, start = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    source = draw(layouts(weights, range(here)))
    same_layout = st.just(source)
    destination = draw(layouts(weights, range(start, start + there), mixed=True) | same_layout)
    bucket, nodes = draw(st.sampled_from([64, 257, 2**20])), draw(st.sampled_from([None, 1, 2]))
    try:
        return Planner(source, destination, bucket_bytes=bucket, ranks_per_node=nodes)
    except BucketError:
        assume(False)
        raise


def strided(param: Param, how: str) -> torch.Tensor:
    """A parameter that lies so, full of NaN."""
    shape, dtype = param.shape, torch_dtype(param.dtype)
    if how == "transposed":
        found = torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    else:
        found = torch.empty((*shape[:-1], shape[-1] + (how == "wide")), dtype=dtype)[..., : shape[-1]]
    return found.fill_(float("nan"))


def live(draw: st.DrawFn, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's parameters, each in any strides."""
    params = layout.params(rank) if rank in layout.ranks else {}
    return {n: strided(p, draw(st.sampled_from(["plain", "transposed", "wide"]))) for n, p in params.items()}


def versions(layout: ListedLayout) -> list[dict[str, torch.Tensor]]:
    """Three times whole tensors of other values, as the layout's parameters hold them."""
    generator = torch.Generator().manual_seed(0)
    dtypes = {t.name: layout.shapes[layout.holders(t.name)[0].piece.param].dtype for t in layout.weights}
    return [
        {t.name: torch.randn(t.shape, generator=generator).to(torch_dtype(dtypes[t.name])) for t in layout.weights}
        for _ in range(3)
    ]


def expected(layout: Layout, rank: int, whole: Tensors) -> Tensors:
    """What a rank should hold."""
    found = like(layout, rank)
    write(layout, rank, whole, found)
    return found


@SETTINGS
@given(reshards(), st.data())
def test_every_element_arrives_converted_once_whatever_the_strides(planner: Planner, data: st.DataObject) -> None:
    ranks, source, destination = range(planner.world), planner.source, planner.destination
    ours = {rank: live(data.draw, source, rank) for rank in ranks}
    theirs = {rank: live(data.draw, destination, rank) for rank in ranks}
    slots, overlaps = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    programs = Programs(planner, ours, theirs, slots=slots, overlaps=overlaps)
    for whole in versions(source):
        for rank in ranks:
            write(source, rank, whole, ours[rank])
        programs.run()
        for rank in ranks:
            assert same(theirs[rank], expected(destination, rank, whole))
            assert same(ours[rank], expected(source, rank, whole))


def placed(tensors: Tensors) -> tuple[Region, dict[str, torch.Tensor]]:
    """A region without pages, and tensors of these shapes in it."""
    region = poison_region(region_bytes(tensor.nbytes for tensor in tensors.values()))
    return region, {name: region.take(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def inverse(planner: Planner) -> Planner | None:
    try:
        return invert_planner(planner)
    except (PlanError, BucketError):
        return None


@SETTINGS
@given(reshards(), st.data())
def test_weights_on_pages_go_there_and_back_where_they_can(planner: Planner, data: st.DataObject) -> None:
    """What both sides may share is shared, and stays; all else has one copy of the pages."""
    ranks, source, destination = range(planner.world), planner.source, planner.destination
    here, there, ours, theirs, kept = {}, {}, {}, {}, {}
    share = data.draw(st.booleans())
    for rank in ranks:
        here[rank], ours[rank] = placed(like(source, rank))
        here[rank].commit()
        aliases = planner.plan(rank).aliases if share else ()
        shared = {alias.destination: ours[rank][alias.source] for alias in aliases}
        own = {name: tensor for name, tensor in like(destination, rank).items() if name not in shared}
        there[rank], taken = placed(own)
        theirs[rank], kept[rank] = taken | shared, list(shared.values())
    slots, overlaps = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    chunk = data.draw(st.sampled_from([1, 100, 2**20]))

    def paging(
        source: dict[int, Region], destination: dict[int, Region], kept: dict[int, list[torch.Tensor]]
    ) -> dict[int, Callable[..., object]]:
        return {r: Paging(source[r], destination[r], kept=kept[r], chunk_bytes=chunk) for r in ranks}

    options = {"slots": slots, "overlaps": overlaps}
    way = Programs(planner, ours, theirs, **options, paging=paging(here, there, kept))
    back = inverse(planner)
    return_way = back and Programs(back, theirs, ours, **options, paging=paging(there, here, {r: [] for r in ranks}))
    for whole in versions(source)[: 3 if return_way else 1]:
        for rank in ranks:
            write(source, rank, whole, ours[rank])
        way.run()
        for rank in ranks:
            there[rank].commit()  # alignment between tensors
            assert same(theirs[rank], expected(destination, rank, whole))
        if return_way:
            return_way.run()
            for rank in ranks:
                here[rank].commit()
                assert same(ours[rank], expected(source, rank, whole))
                assert there[rank].committed_bytes == 0
