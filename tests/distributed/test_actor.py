"""One batch, one update: the same log-probs, loss, gradient and weights however the world and the batch are cut."""

import numpy as np
import pytest
import torch

from tests.distributed import actor_runs
from tests.models.tiny import tiny_folder

SGD = {"name": "sgd", "lr": 0.05, "clip_grad": 0.0}
ADAM = {"name": "adam", "lr": 1e-3}

WORLDS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "etp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "dp4": (4, {}),
    "ep4": (4, {"ep": 4}),
    "tp4-ep4": (4, {"tp": 4, "ep": 4}),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "tp2-ep4": (4, {"tp": 2, "ep": 4}),
    "tp2-pp2-ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2-uneven": (2, {"pp": 2, "first_stage_layers": 3}),
    "pp4": (4, {"pp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2, "etp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
    "cp2-dp2": (4, {"cp": 2}),
}
OWN_WORLDS = {
    "tp2-etp1": (2, {"tp": 2}),
    "etp2": (2, {"etp": 2}),
    "tp4-etp1": (4, {"tp": 4}),
    "tp4-ep2-etp2": (4, {"tp": 4, "ep": 2, "etp": 2}),
    "tp2-dp2-etp1": (4, {"tp": 2}),
}
"""Where replicas of the experts lie on tensor-parallel ranks, which Megatron's own experts get wrong, or TP exceeds the
key-value heads."""
LAYOUTS = {"engine": {**WORLDS, **OWN_WORLDS}, "megatron": WORLDS}
"""Worlds in which each parameter layout is trained."""
CUTS = {
    "packed": {},
    "packed-small": {"max_tokens_per_micro_batch": 16},
    "packed-1": {"micro_batch_size": 1},
    "padded": {"packing": False},
    "padded-2": {"packing": False, "micro_batch_size": 2},
}
FAMILIES = [
    "deepseek_moe",
    "glm4_moe_qk_norm",
    "mixtral",
    "qwen3_moe_tied",
    "qwen3_moe_mixed",
    "qwen3_tied",
    "qwen2",
    "llama_biased",
]
LOSSES = {
    "ppo_clip": "token_mean",
    "gspo": "seq_mean_token_mean",
    "cispo": "token_mean",
    "policy_gradient": "seq_mean_token_sum",
    "clip_cov": "token_mean",
    "kl_cov": "token_mean",
}
"""Policy losses, and how their tokens are weighed here."""
FAMILY_DEFAULT = [
    ("engine", "tp2-ep2", "glm4_moe_qk_norm"),
    ("megatron", "pp2", "glm4_moe"),
    ("engine", "tp2-ep2", "deepseek_moe"),
    ("engine", "tp2-etp1", "moonlight_moe"),
    ("megatron", "pp2", "deepseek_moe"),
    ("engine", "cp2-ep2", "deepseek_moe"),
]
DEFAULT = [
    ("engine", "dp2", "packed-1"),
    ("engine", "tp2-ep2", "packed-small"),
    ("engine", "pp2", "padded-2"),
    ("engine", "tp2-etp1", "padded-2"),
    ("engine", "tp4-etp1", "packed-small"),
    ("engine", "cp2-ep2", "packed-small"),
    ("engine", "cp2-pp2", "padded-2"),
    ("engine", "cp2-tp2", "packed-1"),
    ("megatron", "cp2-dp2", "padded"),
    ("megatron", "tp2-ep2", "padded"),
    ("megatron", "pp2", "padded-2"),
    ("megatron", "vpp2", "packed-small"),
]


def run(pool, layout, world, cut, optimizer, variant="qwen3_moe", steps=1, policy_loss="ppo_clip"):
    size, parallel = LAYOUTS[layout].get(world, (1, {}))
    results = pool.run(
        actor_runs.updates,
        world=size,
        folder=tiny_folder(variant),
        steps=steps,
        parallel=parallel,
        trainer=CUTS[cut],
        optimizer=optimizer,
        model={"parameter_layout": layout, "vocab_multiple": 8},
        algorithm={"policy_loss": policy_loss, "aggregate": LOSSES[policy_loss]},
    )
    for other in results[1:]:
        assert other["metrics"] == results[0]["metrics"]
        assert all(np.array_equal(a, b) for a, b in zip(other["log_probs"], results[0]["log_probs"], strict=True))
    return results[0]


_baselines = {}


def baseline(pool, variant, optimizer, steps, policy_loss="ppo_clip"):
    """The same on one rank, in one pack, in Megatron's own layout."""
    key = (variant, optimizer["name"], steps, policy_loss)
    if key not in _baselines:
        _baselines[key] = run(pool, "megatron", "one", "packed", optimizer, variant, steps, policy_loss)
    return _baselines[key]


def assert_same_update(got, expected):
    """Log-probs 1e-5, loss 1e-5, each parameter's gradient 1e-5 of its norm, weights 1e-6."""
    for name in ("log_probs", "entropy"):
        for ours, theirs in zip(got[name], expected[name], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for name, value in expected["metrics"][0].items():
        if name != "micro_batches":
            assert got["metrics"][0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert got["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        idle = ".experts." in name or name.endswith("correction_bias")  # no token, or no gradient ever
        assert idle or gradient.norm() > 0, name
        assert (got["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-6, msg=name)


def matrix(worlds=None):
    """Each layout with each of its worlds, or of those of `worlds` that it has."""
    return [
        (layout, world) for layout, own in LAYOUTS.items() for world in ("one", *own) if not worlds or world in worlds
    ]


@pytest.mark.parametrize(("layout", "world", "cut"), DEFAULT)
def test_one_update_does_not_depend_on_the_world(pool, layout, world, cut):
    assert_same_update(run(pool, layout, world, cut, SGD), baseline(pool, "qwen3_moe", SGD, 1))


@pytest.mark.parametrize(("layout", "world", "variant"), FAMILY_DEFAULT)
def test_one_update_with_sigmoid_routing_does_not_depend_on_the_world(pool, layout, world, variant):
    assert_same_update(run(pool, layout, world, "packed-small", SGD, variant), baseline(pool, variant, SGD, 1))


@pytest.mark.parametrize("policy_loss", [name for name in LOSSES if name != "ppo_clip"])
def test_one_update_by_each_loss_does_not_depend_on_the_world(pool, policy_loss):
    got = run(pool, "engine", "tp2-ep2", "packed-small", SGD, policy_loss=policy_loss)
    assert_same_update(got, baseline(pool, "qwen3_moe", SGD, 1, policy_loss))


@pytest.mark.full
@pytest.mark.parametrize("policy_loss", [name for name in LOSSES if name != "ppo_clip"])
@pytest.mark.parametrize(("layout", "world", "cut"), DEFAULT)
def test_one_update_by_each_loss_does_not_depend_on_many_worlds(pool, policy_loss, layout, world, cut):
    got = run(pool, layout, world, cut, SGD, policy_loss=policy_loss)
    assert_same_update(got, baseline(pool, "qwen3_moe", SGD, 1, policy_loss))


@pytest.mark.full
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("layout", "world"), matrix())
def test_one_update_does_not_depend_on_any_world_or_cut(pool, layout, world, cut):
    assert_same_update(run(pool, layout, world, cut, SGD), baseline(pool, "qwen3_moe", SGD, 1))


@pytest.mark.full
@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize(("layout", "world"), matrix(["dp2", "tp2", "pp2", "ep2", "tp2-ep2", "vpp2", "tp4-etp1"]))
def test_one_update_of_each_family_does_not_depend_on_the_world(pool, variant, layout, world):
    if "moe" not in variant and variant != "mixtral" and "ep" in world:
        pytest.skip("no experts")
    assert_same_update(run(pool, layout, world, "packed-small", SGD, variant), baseline(pool, variant, SGD, 1))


def assert_same_steps(got, expected):
    for step, (ours, theirs) in enumerate(zip(got["metrics"], expected["metrics"], strict=True)):
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], abs=1e-4), step
        assert ours["lr"] == theirs["lr"]


@pytest.mark.parametrize(
    ("layout", "world", "cut"),
    [("engine", "dp2", "packed-small"), ("engine", "tp2-etp1", "padded"), ("megatron", "tp2-ep2", "padded")],
)
def test_five_adam_steps_do_not_depend_on_the_world(pool, layout, world, cut):
    got = run(pool, layout, world, cut, {**ADAM, "distributed": True}, steps=5)
    assert_same_steps(got, baseline(pool, "qwen3_moe", ADAM, 5))


@pytest.mark.full
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("cut", ["packed-small", "padded-2"])
@pytest.mark.parametrize(("layout", "world"), matrix())
def test_five_adam_steps_do_not_depend_on_any_world(pool, layout, world, cut, distributed):
    got = run(pool, layout, world, cut, {**ADAM, "distributed": distributed}, steps=5)
    assert_same_steps(got, baseline(pool, "qwen3_moe", ADAM, 5))
