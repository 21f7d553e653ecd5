"""Real layouts, simulated in one process: every element of every engine parameter is what the layout says."""

from collections.abc import Callable, Iterable

import pytest

from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.invert import invert, invert_planner
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.survey import PlanError
from tests.reshard import worlds
from tests.reshard.models import CONFIGS, weights

Sizes = dict[str, int]

TRAINING: dict[str, tuple[Sizes, Sizes]] = {
    "one": ({"world": 1}, {}),
    "dp2": ({"world": 2}, {}),
    "tp2": ({"world": 2, "tp": 2}, {}),
    "tp4": ({"world": 4, "tp": 4}, {}),
    "tp8": ({"world": 8, "tp": 8}, {}),
    "pp2": ({"world": 2, "pp": 2}, {}),
    "pp3 uneven": ({"world": 3, "pp": 3}, {"first_stage_layers": 1, "last_stage_layers": 1}),
    "pp2 vpp2": ({"world": 2, "pp": 2}, {"vpp": 2}),
    "ep2": ({"world": 2, "ep": 2}, {}),
    "ep4 tp2": ({"world": 4, "tp": 2, "ep": 4}, {}),
    "tp2 pp2 ep2": ({"world": 4, "tp": 2, "pp": 2, "ep": 2}, {}),
    "tp2 ep2 etp2": ({"world": 4, "tp": 2, "ep": 2, "etp": 2}, {}),
    "tp4 pp2 ep2 etp2": ({"world": 8, "tp": 4, "pp": 2, "ep": 2, "etp": 2}, {}),
    "cp2 tp2 ep4": ({"world": 8, "tp": 2, "cp": 2, "ep": 4}, {}),
    "tp4 pp4 ep4 dp4": ({"world": 64, "tp": 4, "pp": 4, "ep": 4}, {}),
}
ENGINES: dict[str, Sizes] = {
    "one": {"world": 1},
    "two of one": {"world": 2},
    "tp2": {"world": 2, "tp": 2},
    "tp2 ep2": {"world": 2, "tp": 2, "ep": 2},
    "tp4": {"world": 4, "tp": 4},
    "tp4 ep4": {"world": 4, "tp": 4, "ep": 4},
    "tp4 ep2": {"world": 4, "tp": 4, "ep": 2},
    "tp4 dp2 ep4": {"world": 4, "tp": 4, "dp": 2, "ep": 4},
    "tp4 dp4 ep2 head": {"world": 4, "tp": 4, "dp": 4, "ep": 2, "dp_lm_head": True, "moe_dense_tp": 1},
    "tp4 ep2 moe_dp2": {"world": 4, "tp": 4, "ep": 2, "moe_dp": 2},
    "tp8 ep8": {"world": 8, "tp": 8, "ep": 8},
    "16 of tp4 ep4": {"world": 64, "tp": 4, "ep": 4},
}
QUICK = [
    ("qwen3_moe", "ep4 tp2", "tp4 ep4", None),
    ("qwen3_moe", "tp4 pp2 ep2 etp2", "tp8 ep8", 4),
    ("qwen3_moe_tied", "tp2 pp2 ep2", "tp4 dp2 ep4", 2),
    ("mixtral", "tp2 ep2 etp2", "tp4", None),
    ("qwen3", "tp8", "tp4", 2),
    ("qwen2_tied", "pp3 uneven", "tp2", None),
    ("llama", "pp2 vpp2", "tp4", 2),
    ("deepseek_v3", "tp4 pp2 ep2 etp2", "tp4 dp4 ep2 head", 2),
    ("deepseek_v3_whole_q", "ep4 tp2", "tp4 ep2 moe_dp2", 2),
    ("glm4_moe", "tp2 pp2 ep2", "tp8 ep8", 4),
    ("qwen3_moe", "tp4 pp4 ep4 dp4", "16 of tp4 ep4", 8),
    ("qwen3_moe", "one", "two of one", None),
]


def training_layout(model: str, training: str, te: bool = False) -> MegatronLayout:
    sizes, options = TRAINING[training]
    return MegatronLayout(weights(model), ParallelSizes(**sizes), vocab_multiple=4, transformer_engine=te, **options)  # type: ignore[arg-type]


def engine_layout(model: str, engine: str) -> SGLangLayout:
    return SGLangLayout(weights(model), RolloutSizes(**ENGINES[engine]))  # type: ignore[arg-type]


def fitting(models: Iterable[str]) -> list[tuple[str, str, str]]:
    """All pairs of layouts that hold the model."""
    found = []
    for model in models:
        ours = [training for training in TRAINING if _builds(training_layout, model, training)]
        theirs = [engine for engine in ENGINES if _builds(engine_layout, model, engine)]
        found += [(model, training, engine) for training in ours for engine in theirs]
    return found


def _builds(build: Callable[[str, str], object], model: str, sizes: str) -> bool:
    try:
        build(model, sizes)
    except ValueError:
        return False
    return True


EVERY = fitting(CONFIGS)


def reshard(
    model: str, training: str, engine: str, nodes: int | None, bucket: int, syncs: int = 1, te: bool = False
) -> Planner:
    """Plans, carries out and checks; returns the planner."""
    source, destination = training_layout(model, training, te=te), engine_layout(model, engine)
    tensors = source.weights
    planner = Planner(source, destination, bucket_bytes=bucket, ranks_per_node=nodes)
    plans = {rank: planner.plan(rank) for rank in range(planner.world)}
    for sync in range(syncs):
        whole = {name: values + 10**6 * sync for name, values in worlds.code(tensors).items()}
        sources = {rank: worlds.fill(source, rank, whole, padding=-9) for rank in source.ranks}
        destinations = {rank: worlds.empty(destination, rank) for rank in destination.ranks}
        worlds.carry_out(plans, sources, destinations)
        for rank in destination.ranks:
            assert worlds.same(destinations[rank], worlds.fill(destination, rank, whole)), f"rank {rank}"
    for plan in plans.values():
        assert max(plan.send_staging_bytes, plan.receive_staging_bytes) <= bucket
    return planner


@pytest.mark.parametrize(("model", "training", "engine", "nodes"), QUICK)
def test_every_engine_parameter_is_what_the_layout_says(
    model: str, training: str, engine: str, nodes: int | None
) -> None:
    reshard(model, training, engine, nodes, bucket=5000)


def test_three_syncs_follow_the_weights() -> None:
    reshard("qwen3_moe", "tp2 ep2 etp2", "tp4 ep4", None, bucket=3000, syncs=3)


@pytest.mark.parametrize("bucket", [70, 128, 1000, 10**9])
def test_a_tensor_larger_than_the_bucket_goes_through_in_parts(bucket: int) -> None:
    reshard("qwen3_moe", "tp2", "tp4 ep4", None, bucket=bucket)


def test_most_layouts_fit_most_models() -> None:
    pairs = fitting(("qwen3_moe", "deepseek_v3"))
    assert len({training for _, training, _ in pairs}) >= 12
    assert len({engine for _, _, engine in pairs}) >= 8


@pytest.mark.full
@pytest.mark.parametrize(("model", "training", "engine"), EVERY)
def test_every_pair_of_layouts(model: str, training: str, engine: str) -> None:
    for nodes, te in ((None, False), (4, True)):
        reshard(model, training, engine, nodes, bucket=2000, syncs=2, te=te)


@pytest.mark.parametrize(
    ("model", "training", "engine"),
    [
        ("qwen3_moe", "ep4 tp2", "tp4 ep4"),
        ("qwen3_moe_tied", "tp2 pp2 ep2", "tp4 dp2 ep4"),
        ("deepseek_v3", "tp2 pp2 ep2", "tp4 ep2"),
        ("glm4_moe", "tp2 ep2 etp2", "tp8 ep8"),
    ],
)
def test_the_way_back_restores_every_training_parameter(model: str, training: str, engine: str) -> None:
    planner = reshard(model, training, engine, 2, bucket=2000)
    back = invert_planner(planner)
    whole = worlds.code(planner.source.weights)
    engines = {rank: worlds.fill(planner.destination, rank, whole) for rank in planner.destination.ranks}
    trained = {rank: worlds.empty(planner.source, rank) for rank in planner.source.ranks}
    worlds.carry_out({rank: back.plan(rank) for rank in range(back.world)}, engines, trained)
    for rank in planner.source.ranks:
        assert worlds.same(trained[rank], worlds.fill(planner.source, rank, whole))
    assert invert(planner.plan(0)) == back.plan(0)


def there_and_back(source: MegatronLayout, destination: SGLangLayout, nodes: int | None) -> None:
    """Three times, with other weights each time: bit for bit the start, wherever each element was meanwhile."""
    planner = Planner(source, destination, bucket_bytes=2000, ranks_per_node=nodes)
    back = invert_planner(planner)
    plans, returns = ({rank: one.plan(rank) for rank in range(one.world)} for one in (planner, back))
    for turn in range(3):
        whole = {name: values + 10**6 * turn for name, values in worlds.code(source.weights).items()}
        start = {rank: worlds.fill(source, rank, whole) for rank in source.ranks}
        engines = {rank: worlds.empty(destination, rank) for rank in destination.ranks}
        worlds.carry_out(plans, start, engines)
        for rank, shard in engines.items():
            assert worlds.same(shard, worlds.fill(destination, rank, whole)), f"turn {turn}, there, rank {rank}"
        trained = {rank: worlds.empty(source, rank) for rank in source.ranks}
        worlds.carry_out(returns, engines, trained)
        for rank, shard in trained.items():
            assert worlds.same(shard, start[rank]), f"turn {turn}, back, rank {rank}"


@pytest.mark.full
@pytest.mark.parametrize("order", ["megatron", "engine"])
@pytest.mark.parametrize(("model", "training"), sorted({(model, training) for model, training, _ in EVERY}))
def test_every_pair_of_layouts_goes_there_and_back(model: str, training: str, order: str) -> None:
    sizes, options = TRAINING[training]
    chosen = {**options, "engine_order": order == "engine"}
    source = MegatronLayout(weights(model), ParallelSizes(**sizes), vocab_multiple=4, **chosen)  # type: ignore[arg-type]
    gone = 0
    engines = [engine for one, ours, engine in EVERY if (one, ours) == (model, training)]
    for number, engine in enumerate(engines):
        destination = engine_layout(model, engine)
        if destination.omitted:
            with pytest.raises(PlanError):
                there_and_back(source, destination, None)
        else:
            there_and_back(source, destination, (None, 2, 4)[number % 3])
            gone += 1
    assert gone or destination.omitted


def test_no_way_back_from_a_narrower_dtype() -> None:
    tensors = weights("qwen3")
    source = MegatronLayout(tensors, ParallelSizes(world=1), dtype="float32")
    planner = Planner(source, SGLangLayout(tensors, RolloutSizes(world=1), dtype="bfloat16"))
    with pytest.raises(PlanError, match=r"model\.embed_tokens\.weight is held as float32 and would come back from bfl"):
        invert(planner.plan(0))


def test_a_dtype_changes_once_and_the_narrower_one_travels() -> None:
    tensors = weights("qwen3")
    for ours, theirs in (("float32", "bfloat16"), ("bfloat16", "float32")):
        source = MegatronLayout(tensors, ParallelSizes(world=2, tp=2), dtype=ours)
        planner = Planner(source, SGLangLayout(tensors, RolloutSizes(world=2), dtype=theirs))
        plan = planner.plan(0)
        assert {(c.source.dtype, c.destination.dtype) for c in plan.copies} == {(ours, theirs)}
        segments = [(m, s) for r in plan.rounds for m in (*r.sends, *r.receives) for s in m.segments]
        assert segments
        assert {s.wire_dtype for _, s in segments} == {"bfloat16"}
        assert not plan.aliases


def test_a_gate_in_float32_receives_bfloat16() -> None:
    planner = reshard("glm4_moe", "tp2 pp2 ep2", "tp4", None, bucket=10**6)
    segments = [s for r in planner.plan(0).rounds for m in r.receives for s in m.segments]
    gates = [s for s in segments if s.view.param.endswith("mlp.gate.weight")]
    biases = [s for s in segments if s.view.param.endswith("e_score_correction_bias")]
    assert {(s.view.dtype, s.wire_dtype) for s in gates} == {("float32", "bfloat16")}
    assert {(s.view.dtype, s.wire_dtype) for s in biases} == {("float32", "float32")}


def test_a_tied_head_of_its_own_is_received_once() -> None:
    planner = reshard("qwen3_moe_tied", "tp2", "two of one", None, bucket=10**6)
    plan = planner.plan(0)
    assert {(e.source.param, e.destination.param) for e in plan.echoes} == {
        ("model.embed_tokens.weight", "lm_head.weight")
    }
    embedding = 150 * 16 * 2
    received = [s for r in plan.rounds for m in r.receives for s in m.segments]
    assert sum(s.nbytes for s in received if "embed_tokens" in s.view.param) == embedding - 76 * 16 * 2
    assert not [s for s in received if s.view.param == "lm_head.weight"]


def test_padding_rows_of_the_engine_are_zeroed_and_not_sent() -> None:
    planner = reshard("qwen3", "tp2", "tp4", None, bucket=10**6)
    fills = {view.param: view for view in planner.plan(3).fills}
    assert set(fills) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert (fills["lm_head.weight"].offset, fills["lm_head.weight"].extent) == ((6, 0), (42, 16))
    assert not planner.plan(0).fills


def test_norms_and_gates_are_aliases_and_are_not_copied() -> None:
    planner = reshard("qwen3_moe", "tp4", "tp4", None, bucket=10**6)
    plan = planner.plan(1)
    names = {alias.destination for alias in plan.aliases}
    assert {"model.norm.weight", "model.layers.0.mlp.gate.weight", "model.layers.3.input_layernorm.weight"} <= names
    assert not names & {copy.destination.param for copy in plan.copies}
    whole = sum(param.nbytes for param in planner.destination.params(1).values())
    padding = sum(view.nbytes for view in plan.fills)
    assert plan.aliased_bytes + plan.copied_bytes + plan.received_bytes + padding == whole
    unshared = Planner(planner.source, planner.destination, alias=False).plan(1)
    assert not unshared.aliases
    assert unshared.copied_bytes == plan.aliased_bytes + plan.copied_bytes


def test_a_fleet_of_its_own_is_only_another_pair_of_layouts() -> None:
    tensors = weights("qwen3_moe")
    source = MegatronLayout(tensors, ParallelSizes(world=4, tp=2, ep=4))
    destination = SGLangLayout(tensors, RolloutSizes(world=4, tp=2, ep=2), ranks=range(4, 8))
    planner = Planner(source, destination, bucket_bytes=4000)
    plans = {rank: planner.plan(rank) for rank in range(8)}
    assert not any(plans[rank].received_bytes or plans[rank].copies for rank in range(4))
    assert not any(plans[rank].sent_bytes or plans[rank].copies for rank in range(4, 8))
    whole = worlds.code(tensors)
    destinations = {rank: worlds.empty(destination, rank) for rank in range(4, 8)}
    worlds.carry_out(plans, {rank: worlds.fill(source, rank, whole) for rank in range(4)}, destinations)
    assert all(worlds.same(destinations[rank], worlds.fill(destination, rank, whole)) for rank in range(4, 8))


@pytest.mark.parametrize(("replicas", "receivers"), [(8, 8), (3, 4), (5, 2), (7, 6)])
def test_replicas_of_a_source_share_the_load(replicas: int, receivers: int) -> None:
    tensors = weights("qwen3_moe")
    source = MegatronLayout(tensors, ParallelSizes(world=replicas))
    ranks = range(replicas, replicas + receivers)
    planner = Planner(source, SGLangLayout(tensors, RolloutSizes(world=receivers, tp=2), ranks=ranks))
    sent = planner.routes.direct.sum(1)[:replicas]
    assert sent.max() - sent.min() <= max(t.nbytes for t in tensors)
    whole = worlds.code(tensors)
    destinations = {rank: worlds.empty(planner.destination, rank) for rank in ranks}
    plans = {rank: planner.plan(rank) for rank in range(planner.world)}
    worlds.carry_out(plans, {rank: worlds.fill(source, rank, whole) for rank in source.ranks}, destinations)
    assert all(worlds.same(destinations[rank], worlds.fill(planner.destination, rank, whole)) for rank in ranks)


def test_stripes_cross_the_network_once_and_are_passed_on_within_the_node() -> None:
    tensors = weights("qwen3")
    source = MegatronLayout(tensors, ParallelSizes(world=2))
    destination = SGLangLayout(tensors, RolloutSizes(world=4), ranks=range(4, 8))
    near = Planner(source, destination)
    assert near.relayed.count == 0
    planner = Planner(source, destination, ranks_per_node=4)
    assert planner.routes.direct.sum() == tensors.nbytes
    assert planner.routes.relayed.sum() == 3 * tensors.nbytes
    assert planner.relayed.count > 0
    assert all(planner.plan(rank).received_bytes == tensors.nbytes for rank in range(4, 8))
