"""The planner on random layouts, against sets of elements."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.bounds import lower_bound
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.schedule import BucketError
from tests.reshard import worlds
from tests.reshard.random_layouts import ListedLayout, layouts, weight_maps

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def reshards(draw: st.DrawFn) -> Planner:
    """Two layouts on equal, overlapping or disjoint ranks, with small buckets and nodes."""
    weights = draw(weight_maps())
    here, there = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    start = draw(st.integers(0, here))
    source = draw(layouts(weights, range(here)))
    destination = draw(layouts(weights, range(start, start + there)))
    nodes = draw(st.sampled_from([None, 1, 2, 4]))
    try:
        bucket = draw(st.sampled_from([64, 100, 1000, 2**20]))
        return Planner(source, destination, bucket_bytes=bucket, ranks_per_node=nodes)
    except BucketError:
        assume(False)
        raise


def elements(layout: Layout, rank: int) -> dict[str, set[int]]:
    """Which elements of each tensor the rank holds."""
    held: dict[str, set[int]] = {}
    for piece in layout.pieces(rank) if rank in layout.ranks else ():
        tensor = layout.weights[piece.tensor]
        numbers = np.arange(tensor.size).reshape(tensor.shape)
        box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        held.setdefault(piece.tensor, set()).update(numbers[box].ravel().tolist())
    return held


def item_bytes(planner: Planner, tensor: str) -> int:
    """Bytes of an element on the wire: those of the narrower dtype."""
    dtypes = [
        layout.shapes[layout.holders(tensor)[0].piece.param].dtype
        for layout in (planner.source, planner.destination)
        if isinstance(layout, ListedLayout)
    ]
    return min(ITEM_BYTES[dtype] for dtype in dtypes)


@SETTINGS
@given(reshards())
def test_every_element_arrives_where_the_layout_wants_it_and_is_written_once(planner: Planner) -> None:
    whole = worlds.code(planner.source.weights)
    plans = {rank: planner.plan(rank) for rank in range(planner.world)}
    sources = {rank: worlds.fill(planner.source, rank, whole, padding=-7) for rank in planner.source.ranks}
    destinations = {rank: worlds.empty(planner.destination, rank) for rank in planner.destination.ranks}
    worlds.carry_out(plans, sources, destinations)
    for rank in planner.destination.ranks:
        assert worlds.same(destinations[rank], worlds.fill(planner.destination, rank, whole))


@SETTINGS
@given(reshards())
def test_a_rank_receives_what_it_needs_and_has_not_and_no_byte_more(planner: Planner) -> None:
    bounds = lower_bound([kind for kind, _ in planner.routes.kinds], planner.world)
    for rank in range(planner.world):
        have, want = elements(planner.source, rank), elements(planner.destination, rank)
        lacking = sum(len(want[t] - have.get(t, set())) * item_bytes(planner, t) for t in want)
        assert planner.plan(rank).received_bytes == lacking == bounds[rank]


@SETTINGS
@given(reshards())
def test_staging_stays_within_the_bucket_and_is_what_the_report_says(planner: Planner) -> None:
    for rank in range(planner.world):
        plan = planner.plan(rank)
        assert plan.send_staging_bytes <= planner.bucket_bytes
        assert plan.receive_staging_bytes <= planner.bucket_bytes
        assert plan.staging_peak_bytes == max(planner.direct.peak(rank), planner.relayed.peak(rank))
        for one in plan.rounds:
            for messages in (one.sends, one.receives):
                ends = [0]
                for message in messages:
                    assert message.offset >= ends[-1]
                    ends.append(message.offset + message.nbytes)
                    at = message.offset
                    for segment in message.segments:
                        assert segment.offset == at
                        assert at % ITEM_BYTES[segment.wire_dtype] == 0
                        at += segment.nbytes
                    assert at == ends[-1]


@SETTINGS
@given(reshards())
def test_two_planners_agree_and_both_ends_of_a_message_too(planner: Planner) -> None:
    other = Planner(
        planner.source,
        planner.destination,
        bucket_bytes=planner.bucket_bytes,
        ranks_per_node=planner.ranks_per_node,
    )
    plans = {rank: planner.plan(rank) for rank in range(planner.world)}
    for rank, plan in plans.items():
        assert other.plan(rank) == plan
        for k, one in enumerate(plan.rounds):
            for message in one.sends:
                (mate,) = [m for m in plans[message.peer].rounds[k].receives if m.peer == rank]
                assert mate.nbytes == message.nbytes
                assert [s.view.size for s in mate.segments] == [s.view.size for s in message.segments]


@SETTINGS
@given(reshards())
def test_no_box_crosses_the_network_twice_to_one_node(planner: Planner) -> None:
    """Where a box goes to a node whose ranks all lack it, its bytes enter the node once, dtypes being equal."""
    if planner.ranks_per_node is None:
        return
    nodes = np.arange(planner.world) // planner.ranks_per_node
    entering = np.zeros(nodes.max() + 1, np.int64)
    for rank in range(planner.world):
        far = nodes != nodes[rank]
        entering[nodes[rank]] += planner.routes.direct[far, rank].sum()
        assert not planner.routes.relayed[far, rank].any()
    for node in range(len(entering)):
        members = [rank for rank in range(planner.world) if nodes[rank] == node]
        most = 0
        for tensor in planner.source.weights:
            have = set().union(*(elements(planner.source, r).get(tensor.name, set()) for r in members))
            wants = [elements(planner.destination, r).get(tensor.name, set()) - have for r in members]
            exact = all(need.exact for kind, _ in planner.routes.kinds for need in kind.needs)
            once = len(set().union(*wants)) if exact and len({frozenset(w) for w in wants if w}) <= 1 else None
            most += (once if once is not None else sum(map(len, wants))) * item_bytes(planner, tensor.name)
        assert entering[node] <= most
