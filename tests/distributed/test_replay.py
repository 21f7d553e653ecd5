"""Routing replay: given experts are taken in every layout, in the recomputation too, and so in the gradients."""

import numpy as np
import pytest
import torch

from tests.distributed import replay_runs
from tests.distributed.actor_runs import LENGTHS
from tests.models.tiny import tiny_folder

SGD = {"name": "sgd", "lr": 0.05, "clip_grad": 0.0}
WORLDS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "pp2": (2, {"pp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-etp1": (2, {"tp": 2}),
    "tp2-pp2-ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2-tp2-ep2": (4, {"cp": 2, "tp": 2, "ep": 2}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
}
CUTS = {
    "packed": {},
    "packed-small": {"max_tokens_per_micro_batch": 16},
    "padded-2": {"packing": False, "micro_batch_size": 2},
}
DEFAULT = [
    ("tp2-ep2", "packed-small", "none"),
    ("pp2", "padded-2", "full"),
    ("vpp2", "packed-small", "full"),
    ("cp2", "padded-2", "none"),
]
MATRIX = [(w, c, r) for w in WORLDS for c in CUTS for r in ("none", "selective", "full")]
_baselines: dict[str, dict] = {}


def run(pool, world, cut, recompute, source, variant="qwen3_moe", steps=2):
    size, parallel = WORLDS[world]
    results = pool.run(
        replay_runs.replayed,
        world=size,
        folder=tiny_folder(variant),
        source=source,
        steps=steps,
        parallel=parallel,
        trainer=CUTS[cut],
        optimizer=SGD,
        model={"recompute": recompute},
    )
    for other in results[1:]:
        assert other["metrics"] == results[0]["metrics"]
        assert all(np.array_equal(a, b) for a, b in zip(other["routes"], results[0]["routes"], strict=True))
    return results


def baseline(pool, source):
    if source not in _baselines:
        _baselines[source] = run(pool, "one", "packed", "none", source)[0]
    return _baselines[source]


def cases():
    marked = [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full) for case in MATRIX]
    return pytest.mark.parametrize(("world", "cut", "recompute"), marked)


@cases()
def test_given_experts_are_taken_in_every_layout(pool, world, cut, recompute):
    one, results = baseline(pool, "given"), run(pool, world, cut, recompute, "given")
    found = results[0]
    for a, b in zip(found["log_probs"], one["log_probs"], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(found["routes"], one["routes"], strict=True):
        assert np.array_equal(np.sort(a), np.sort(b))
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, atol=2e-5, rtol=1e-4, msg=name)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=2e-5, rtol=1e-4, msg=name)
    assert found["metrics"][0]["routing/replayed"] == pytest.approx((sum(LENGTHS) - len(LENGTHS)) / sum(LENGTHS))
    assert 0.5 < found["metrics"][0]["routing/changed"] <= 1


def test_the_experts_that_are_given_are_those_that_are_used(pool):
    found = baseline(pool, "given")
    rows = replay_runs.random_routes(replay_runs.make_rows(), 4, 8, 2)
    for row, routes in zip(rows, found["routes"], strict=True):
        assert np.array_equal(np.sort(routes[:-1]), np.sort(row.routes[:-1]))
        assert (routes[-1] >= 0).all()  # the router's own


@pytest.mark.parametrize("world", ["one", "tp2-ep2"])
def test_the_first_passs_experts_are_taken_by_all_updates(pool, world):
    free = run(pool, world, "packed", "none", "none", steps=1)[0]
    results = run(pool, world, "packed", "none", "own", steps=3)
    first, last = results[0]["metrics"][0], results[0]["metrics"][-1]
    assert first["routing/replayed"] == last["routing/replayed"] == 1
    assert first["routing/changed"] == 0
    # The first update is the one without replay, since nothing has changed yet.
    for name, gradient in free["gradients"].items():
        torch.testing.assert_close(results[0]["gradients"][name], gradient, atol=1e-6, rtol=1e-6, msg=name)


def test_the_recomputation_takes_the_experts_of_the_forward_pass(pool):
    for rank in run(pool, "pp2", "packed-small", "full", "given"):
        forward, again = {}, {}
        for layer, learns, chosen in rank["maps"]:
            (again if learns else forward).setdefault(layer, []).append(chosen)
        assert forward
        assert forward.keys() == again.keys()
        for layer in forward:
            assert len(forward[layer]) > 1
            assert len(forward[layer]) == len(again[layer])
            assert all(torch.equal(a, b) for a, b in zip(forward[layer], again[layer], strict=True))


@pytest.mark.parametrize("variant", ["qwen3_moe_mixed", "mixtral"])
def test_other_families_and_dense_layers(pool, variant):
    (one,) = run(pool, "one", "packed", "none", "given", variant)
    two = run(pool, "tp2-ep2", "packed-small", "none", "given", variant)[0]
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(two["gradients"][name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_missing_and_misshapen_experts_are_named(pool):
    (told,) = pool.run(replay_runs.refused, world=1, folder=tiny_folder("qwen3_moe"))
    assert "rows [0] have no routed experts" in told[0]
    assert "[" in told[1]
    assert "expected" in told[1]


def test_replay_lowers_the_mismatch_in_bfloat16(pool):
    (found,) = pool.run(replay_runs.mismatches, world=1, folder=tiny_folder("qwen3_moe"), model={"dtype": "bfloat16"})
    assert found["replayed"] < found["free"]


def test_the_load_of_experts_is_told(pool):
    metrics = baseline(pool, "given")["metrics"][0]
    assert metrics["moe/load_max"] >= metrics["moe/load_max_mean"] >= 1
    assert 0 < metrics["moe/load_entropy"] <= 1
    assert metrics["moe/idle_experts"] == int(metrics["moe/idle_experts"]) >= 0
    other = run(pool, "tp2-pp2-ep2", "padded-2", "none", "given")[0]["metrics"][0]
    for name in ("moe/load_max", "moe/load_max_mean", "moe/load_entropy", "moe/idle_experts"):
        assert other[name] == pytest.approx(metrics[name], rel=1e-6), name
