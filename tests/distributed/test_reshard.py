"""Live reshards on gloo ranks: each element arrives where the layout says, sync after sync, as on the golden path."""

import pytest

from tests.distributed import reshard_runs
from tests.distributed.reshard_runs import ENGINES, SPECS, TRAINING

DENSE_TRAINING = [name for name in TRAINING if "ep" not in name and "etp" not in name]
DENSE_ENGINES = [name for name in ENGINES if "ep" not in name]
ALL = [(train, engine) for train in TRAINING for engine in ENGINES]


def spread(trains, engines, step, first=0):
    """Every `step`-th pair along the diagonals: each name of either side is in several."""
    return [(t, e) for i, t in enumerate(trains) for j, e in enumerate(engines) if (i + j) % step == first]


@pytest.mark.parametrize(("transport", "first"), [("shared", 5), ("gloo", 0)])
def test_codes_arrive_over_layouts_of_experts(pool, transport, first):
    pairs = spread(TRAINING, ENGINES, 10, first)
    assert {t for t, _ in pairs} == set(TRAINING)
    assert {e for _, e in pairs} == set(ENGINES)
    told = pool.run(reshard_runs.sync_pairs, world=4, spec="moe", pairs=pairs, bucket_bytes=2**15, transport=transport)
    for own in told:
        assert max(one["rounds"] for one in own) > 2


@pytest.mark.parametrize("spec", ["deepseek", "moonlight", "glm"])
def test_codes_arrive_in_models_with_latent_attention_and_shared_experts(pool, spec):
    pairs = [
        ("tp2 ep4", "tp4 ep4"),
        ("tp2 pp2 vpp2", "tp4 dp2 ep4"),
        ("tp4, engine's order", "tp2 ep2 twice, crossed"),
        ("pp2 ep2, engine's order", "whole on the last two"),
        ("tp2 cp2", "tp4"),
    ]
    pool.run(reshard_runs.sync_pairs, world=4, spec=spec, pairs=pairs, bucket_bytes=2**14, verify=True)


def test_codes_arrive_in_a_tied_dense_model(pool):
    pairs = spread(DENSE_TRAINING, DENSE_ENGINES, 3)
    pool.run(reshard_runs.sync_pairs, world=4, spec="tied", pairs=pairs, bucket_bytes=2**20, verify=True)


@pytest.mark.parametrize(("bucket_bytes", "transport"), [(512, "shared"), (3001, "shared"), (3001, "gloo")])
def test_a_bucket_smaller_than_one_tensor(pool, bucket_bytes, transport):
    """A bucket that no tensor fits, one that is no multiple of an element, and syncs that are checked as well."""
    pairs = [("tp2 ep4", "tp4 ep4"), ("pp2 ep2 uneven", "tp2 twice"), ("tp2 ep2 etp2", "whole on the last two")]
    for told in pool.run(
        reshard_runs.sync_pairs,
        world=4,
        spec="moe",
        pairs=pairs,
        bucket_bytes=bucket_bytes,
        verify=True,
        transport=transport,
    ):
        assert min(one["rounds"] for one in told) > 5


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("bucket_bytes", "transport"), [(2**12, "shared"), (2**26, "shared"), (2**12, "gloo")])
@pytest.mark.parametrize("spec", SPECS)
def test_codes_arrive_over_all_pairs_of_layouts(pool, spec, bucket_bytes, transport):
    pairs = ALL
    if SPECS[spec].moe is None:
        pairs = [(t, e) for t, e in ALL if t in DENSE_TRAINING and e in DENSE_ENGINES]
    if spec == "mixtral":
        pairs = [(t, e) for t, e in ALL if "dp2" not in e]
    options = {"spec": spec, "pairs": pairs, "bucket_bytes": bucket_bytes, "transport": transport}
    pool.run(reshard_runs.sync_pairs, world=4, timeout=1500.0, **options)
