"""The engine's parameters are live: a sync writes them in place, and sleep may give their memory back."""

import pytest
import torch

from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.parameters import OwnStorages, by_layout
from hybridrl.rollout.transformers_engine import TransformersEngine
from tests.models.tiny import tiny_folder
from tests.rollout.common import loaded_engine, prompt, reference_log_probs, reference_model, requests

ASKED = requests([prompt(i) for i in range(4)], n=2)


def test_each_generation_uses_the_weights_written_since_the_last() -> None:
    engine, model = loaded_engine(), reference_model()
    seen = []
    for version in range(3):
        with torch.no_grad():
            for name, tensor in engine.parameters().items():
                new = model.state_dict()[name] * (1.0 - 0.2 * version)
                tensor.copy_(new)
                model.state_dict()[name].copy_(new)
        engine.publish(version)
        samples = engine.generate(ASKED)
        for request, sample in zip(ASKED, samples, strict=True):
            assert sample.log_probs == pytest.approx(reference_log_probs(model, request, sample.response_ids), abs=1e-5)
            assert sample.versions == [version] * len(sample.response_ids)
        seen.append([s.log_probs for s in samples])
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_tied", "mixtral", "llama_biased"])
def test_an_engine_without_weights_equals_a_loaded_one_once_they_are_written(variant: str) -> None:
    loaded = loaded_engine(variant)
    engine = TransformersEngine(tiny_folder(variant))
    assert engine.parameters().keys() == loaded.parameters().keys()
    for name, tensor in engine.parameters().items():
        tensor.copy_(loaded.parameters()[name])
    engine.publish(0)
    assert engine.generate(ASKED) == loaded.generate(ASKED)


def test_a_module_that_its_layout_does_not_describe_is_refused_by_name() -> None:
    engine = loaded_engine()
    tensors = dict(engine.parameters())
    tensors["model.new.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:3]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    with pytest.raises(ValueError, match="disagree") as caught:
        by_layout(tensors, engine.layout, 0, owner="the model")
    for problem in (
        "model.norm.weight is absent in the model, float32 [32] in the layout",
        "model.new.weight is float32 [32] in the model, absent in the layout",
        "lm_head.weight is float32 [3, 32] in the model",
        "model.embed_tokens.weight is float16 [50, 32] in the model",
    ):
        assert problem in str(caught.value)


def test_ranks_are_replicas_in_ascending_order() -> None:
    engine = loaded_engine(ranks=(5, 2, 9), rank=5)
    assert (engine.replica, engine.num_replicas, tuple(engine.layout.ranks)) == (1, 3, (2, 5, 9))
    with pytest.raises(ValueError, match="rank 4 is not among"):
        loaded_engine(ranks=(5, 2), rank=4)


def test_a_tied_weight_is_one_parameter() -> None:
    engine = loaded_engine("qwen3_moe_tied")
    assert "lm_head.weight" not in engine.parameters()
    assert "model.embed_tokens.weight" in engine.parameters()


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_tied"])
def test_sleep_gives_back_storage_and_wake_brings_the_same_tensors(variant: str) -> None:
    engine = loaded_engine(variant, release_weights=True)
    expected = engine.generate(ASKED)
    tensors = dict(engine.parameters())
    views = {name: tensor.view(-1)[:1] for name, tensor in tensors.items()}
    for _ in range(2):
        kept = {name: tensor.clone() for name, tensor in engine.parameters().items()}
        engine.sleep()
        engine.sleep()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*tensors.values(), *views.values()))
        with pytest.raises(EngineStateError, match="wake"):
            engine.parameters()
        engine.wake()
        assert all(engine.parameters()[name] is tensor for name, tensor in tensors.items())
        for name, tensor in engine.parameters().items():
            tensor.fill_(float("nan"))
            tensor.copy_(kept[name])
        engine.publish(1)
        assert [s.response_ids for s in engine.generate(ASKED)] == [s.response_ids for s in expected]
        assert [s.log_probs for s in engine.generate(ASKED)] == [s.log_probs for s in expected]


def test_weights_that_the_engine_does_not_own_survive_its_sleep() -> None:
    engine = loaded_engine()
    kept = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine.sleep()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.parameters().items())


def test_storages_come_back_where_some_were_given_away_meanwhile() -> None:
    first, second = torch.ones(4), torch.ones(6)
    own = OwnStorages([first, first[2:], second, torch.empty(0)])
    assert own.nbytes == 40
    own.free()
    own.free()
    assert own.freed
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (0, 0)
    own.keep([second])
    own.restore()
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (0, 24)
    assert (own.nbytes, own.freed) == (24, False)
