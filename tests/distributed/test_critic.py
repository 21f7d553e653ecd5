"""Models with a scalar head: the same values, gradients and updates however the world is cut, and transformers' own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrl.config.critic import critic_config
from hybridrl.config.schema import Config, CriticParallelConfig
from tests.distributed import critic_runs
from tests.models.tiny import tiny_folder

SGD = {"name": "sgd", "lr": 0.01, "clip_grad": 0.0}
WORLDS = {
    "dp2": (2, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "cp2": (2, {"cp": 2}),
}
CUTS = {"packed": {}, "small": {"max_tokens_per_micro_batch": 24}, "padded": {"packing": False, "micro_batch_size": 2}}
QUICK = [("dp2", "small"), ("tp2-ep2", "padded"), ("pp2", "small"), ("tp2-pp2", "small"), ("cp2", "small")]


def run(pool, kind, variant, layout, world, cut):
    size, parallel = WORLDS.get(world, (1, {}))
    function = critic_runs.value_updates if kind == "critic" else critic_runs.pair_updates
    options = {"trainer": CUTS[cut], "optimizer": SGD, "model": {"parameter_layout": layout, "vocab_multiple": 8}}
    found = pool.run(function, world=size, folder=tiny_folder(variant), steps=2, parallel=parallel, **options)
    for other in found[1:]:
        assert other["metrics"] == found[0]["metrics"]
        assert all(np.array_equal(a, b) for a, b in zip(other["values"], found[0]["values"], strict=True))
    return found[0]


_alone = {}


def check(pool, kind, variant, layout, world, cut):
    if (kind, variant) not in _alone:
        _alone[kind, variant] = run(pool, kind, variant, "engine", "one", "packed")
    expected, got = _alone[kind, variant], run(pool, kind, variant, layout, world, cut)
    for ours, theirs in zip(got["values"], expected["values"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        assert np.abs(theirs).max() > 0.1
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        for name, value in theirs.items():
            if name != "micro_batches":
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert "score.weight" in expected["gradients"]
    assert "lm_head.weight" not in expected["gradients"]
    for name, gradient in expected["gradients"].items():
        assert gradient.norm() > 0 or ".experts." in name, name  # some experts see no trained token
        assert (got["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(("world", "cut"), QUICK)
def test_updates_of_a_critic_do_not_depend_on_the_world(pool, world, cut):
    check(pool, "critic", "qwen3_moe", "engine", world, cut)


@pytest.mark.parametrize(("world", "cut"), QUICK[:2])
def test_updates_of_a_reward_model_do_not_depend_on_the_world(pool, world, cut):
    check(pool, "reward model", "qwen3_moe_tied", "megatron", world, cut)


@pytest.mark.full
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["engine", "megatron"])
@pytest.mark.parametrize(("kind", "variant"), [("critic", "qwen3_tied"), ("reward model", "qwen3_moe_tied")])
def test_updates_do_not_depend_on_any_world(pool, kind, variant, layout, world, cut):
    if variant == "qwen3_tied" and "ep" in world:
        pytest.skip("no experts")
    if variant != "qwen3_tied" and layout == "megatron" and world in ("tp2", "tp2-pp2"):
        pytest.skip("Megatron's own experts would be trained wrongly there, which is refused")
    check(pool, kind, variant, layout, world, cut)


@pytest.mark.parametrize(
    ("policy", "critic"), [({"tp": 2, "ep": 2}, {"tp": 1, "ep": 1}), ({}, {"tp": 2, "ep": 2}), ({"pp": 2}, {"pp": 1})]
)
def test_a_critic_in_a_layout_of_its_own_makes_the_same_updates(pool, policy, critic):
    run = {"folder": tiny_folder("qwen3_moe"), "steps": 2}
    same = {"lr": 0.01, "lr_warmup_steps": 0, "parallel": CriticParallelConfig()}
    options = {"optimizer": SGD, "trainer": {"max_tokens_per_micro_batch": 24}}
    (alone,) = pool.run(critic_runs.beside_an_actor, world=1, critic=same, **run, **options)
    own = {**same, "parallel": CriticParallelConfig(**critic)}
    for found in pool.run(critic_runs.beside_an_actor, world=2, parallel=policy, critic=own, **run, **options):
        assert {k: getattr(found["sizes"], k) for k in critic} == critic
        for ours, theirs in zip(found["values"], alone["values"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        for name in ("metrics", "actor"):
            for ours, theirs in zip(found[name], alone[name], strict=True):
                for key, value in theirs.items():
                    if key != "micro_batches":
                        assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        for ours, theirs in zip(found["log_probs"], alone["log_probs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "ep": 2}])
def test_a_new_critic_values_everything_at_zero_and_learns_at_its_own_rate(pool, parallel):
    options = {"parallel": parallel, "critic": {"lr": 0.02}, "optimizer": {"lr": 0.5, "distributed": True}}
    for zero, used, own in pool.run(critic_runs.new_critic, world=2, folder=tiny_folder("qwen3_moe"), **options):
        assert zero
        assert used == own == 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_critic_in_lower_precision_has_masters(pool, dtype):
    options = {"model": {"dtype": dtype}, "optimizer": {"distributed": True}}
    for zero, *_ in pool.run(critic_runs.new_critic, world=2, folder=tiny_folder("qwen3_moe"), **options):
        assert zero


def test_a_reward_model_is_exported_as_transformers_sequence_classifier(pool, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "rm"
    folder = tiny_folder("qwen3_moe")
    results = pool.run(critic_runs.export_and_read, world=2, folder=folder, out=out, parallel={"tp": 2, "ep": 2})
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model).__name__ == "Qwen3MoeForSequenceClassification"
    for before, again in results:
        for sequence, ours, read in zip(critic_runs.SEQUENCES, before, again, strict=True):
            with torch.no_grad():
                theirs = model(torch.tensor([sequence])).logits[0].item()
            assert ours == pytest.approx(theirs, abs=1e-5)
            assert read == pytest.approx(ours, abs=1e-6)


def test_the_critics_own_learning_rate_takes_the_place_of_the_policys():
    config = Config()
    config.optimizer.weight_decay = 0.5
    config.critic.lr, config.critic.min_lr, config.critic.lr_warmup_steps = 0.1, 0.01, 7
    own = critic_config(config).optimizer
    assert (own.lr, own.min_lr, own.warmup_steps, own.weight_decay) == (0.1, 0.01, 7, 0.5)


def test_the_critics_own_sizes_take_the_place_of_the_policys():
    config = Config()
    config.parallel.tp, config.parallel.pp, config.parallel.vpp, config.parallel.sequence_parallel = 4, 2, 3, True
    assert critic_config(config).parallel == config.parallel
    config.critic.parallel.tp, config.critic.parallel.pp = 1, 1
    own = critic_config(config).parallel
    assert (own.tp, own.pp, own.vpp, own.ep, own.sequence_parallel) == (1, 1, 1, 1, None)
