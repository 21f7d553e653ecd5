"""One copy of the weights with the real engine: SGLang generates from the trainer's own storage."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
MOVED = ("sync/received_bytes", "sync/sent_bytes", "sync/copied_bytes", "sync/staging_bytes")


def _generate_and_learn(variant: str, cut: dict[str, int], release: bool, **options: Any) -> dict[str, Any]:
    from hybridrl.reshard.sync import WeightSync
    from hybridrl.rollout.sglang.engine import SGLangEngine
    from hybridrl.training.losses import make_loss
    from hybridrl.training.rows import Row
    from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs

    actor = make_actor(support.folder(variant), model={"parameter_layout": "engine"}, **options)
    rows = with_old_log_probs(make_rows(), actor)
    engine = SGLangEngine(support.options(variant, **cut), release_weights=release)
    try:
        parameters = engine.parameters()
        rank = torch.distributed.get_rank()
        sync = WeightSync(actor.layout, actor.tensors(), engine.layout, parameters, rank, adopt=engine.adopt)
        moved, errors, responses = [], [], []
        for version in range(4):
            if version:
                engine.sleep()
                actor.update(rows, make_loss(actor.config.algorithm, 16))
                engine.wake()
            metrics = sync.run(version)
            engine.publish(version)
            samples = engine.generate(support.requests(4, max_new_tokens=8))
            whole = [np.array([*s.prompt.token_ids, *s.response_ids]) for s in samples]
            scored = [Row(index=i, token_ids=ids, mask=np.arange(len(ids)) > 0) for i, ids in enumerate(whole)]
            ours = [p[len(s.prompt.token_ids) :] for p, s in zip(actor.log_probs(scored), samples, strict=True)]
            theirs = [np.array(s.log_probs) for s in samples]
            errors.append(max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)))
            moved.append(sum(metrics[name] for name in MOVED))
            responses.append(theirs)
        changed = [any(not np.allclose(a, b) for a, b in zip(responses[0], r, strict=True)) for r in responses[1:]]
        total = sum(p.nbytes for p in parameters.values())
        return {"moved": moved, "errors": errors, "changed": changed, "aliased": sync.aliased_bytes, "bytes": total}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("variant", "world", "train", "cut", "release"),
    [
        ("qwen3_moe", 1, {}, {}, True),
        ("qwen3_moe", 2, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}, False),
        pytest.param("mixtral", 2, {"tp": 2, "etp": 2}, {"tp": 2}, False, marks=pytest.mark.full),
        pytest.param("qwen3_moe_tied", 2, {}, {}, True, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 4, {"tp": 4, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2}, False, marks=pytest.mark.full),
        pytest.param("qwen2_tied", 4, {"tp": 4}, {"tp": 4}, True, marks=pytest.mark.full),
    ],
)
def test_sglang_generates_from_the_trainers_storage(
    pool: WorkerPool, variant: str, world: int, train: dict[str, int], cut: dict[str, int], release: bool
) -> None:
    support.folder(variant)
    run = {"variant": variant, "cut": cut, "release": release, "parallel": train, "optimizer": {"lr": 0.01}}
    for found in pool.run(_generate_and_learn, world, **run):
        assert found["moved"] == [0, 0, 0, 0]
        assert found["aliased"] == found["bytes"]
        assert max(found["errors"]) <= 1e-4
        assert all(found["changed"])


SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 64, "moe_intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 64},
    "large": {"hidden_size": 320, "moe_intermediate_size": 320, "vocab_size": 1024, "max_position_embeddings": 64},
}


def _work_to_service(size: str) -> tuple[list[str], int, int]:
    """From a finished update to weights in service, for the third time: the operators that are called, and the bytes
    that they are given; and the model's bytes."""
    from hybridrl.reshard.sync import WeightSync
    from hybridrl.rollout.sglang.engine import SGLangEngine
    from hybridrl.rollout.sglang.options import EngineOptions
    from tests.distributed.actor_runs import make_actor
    from tests.distributed.reshard_again import Calls

    folder = tiny_folder("qwen3_moe", **SIZES[size])
    actor, rank = make_actor(folder, model={"parameter_layout": "engine"}), torch.distributed.get_rank()
    sizes: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_positions": 64, "kv_tokens": 256}
    engine = SGLangEngine(EngineOptions(folder=folder, **sizes))
    try:
        parameters = engine.parameters()
        sync = WeightSync(actor.layout, actor.tensors(), engine.layout, parameters, rank, adopt=engine.adopt)
        for version in range(3):
            with Calls() as calls:
                moved = sync.run(version)
                engine.publish(version)
            assert not any(moved[name] for name in MOVED)
        return calls.names, calls.given_bytes, sum(p.nbytes for p in parameters.values())
    finally:
        engine.close()


def test_weights_come_into_service_by_the_same_work_whatever_the_models_size(pool: WorkerPool) -> None:
    for size in SIZES.values():
        tiny_folder("qwen3_moe", **size)
    (*small, fewer), (*large, more) = (pool.run(_work_to_service, 1, size=size)[0] for size in SIZES)
    assert more > 10 * fewer
    assert small == large
    assert small[1] < fewer / 100


@pytest.mark.parametrize(
    ("variant", "world", "train", "cut"),
    [
        ("deepseek_moe", 2, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
        pytest.param("moonlight_moe", 1, {}, {}, marks=pytest.mark.full),
    ],
)
def test_latents_are_absorbed_by_weights_of_which_some_or_all_are_the_trainers(
    pool: WorkerPool, variant: str, world: int, train: dict[str, int], cut: dict[str, int]
) -> None:
    support.folder(variant)
    run = {"variant": variant, "cut": cut, "release": True, "parallel": train, "optimizer": {"lr": 0.01}}
    for found in pool.run(_generate_and_learn, world, **run):
        assert 0 < found["aliased"] <= found["bytes"]
        assert max(found["errors"]) <= 1e-4
        assert all(found["changed"])


def _generate_from_one_copy(variant: str, cut: dict[str, int], **options: Any) -> dict[str, Any]:
    from hybridrl.memory.single import SingleWeights
    from hybridrl.rollout.sglang.engine import SGLangEngine
    from hybridrl.training.losses import make_loss
    from hybridrl.training.rows import Row
    from tests.distributed.actor_runs import make_actor, make_rows, with_old_log_probs

    actor = make_actor(support.folder(variant), memory={"parameters": "single"}, **options)
    rows = with_old_log_probs(make_rows(), actor)
    engine = SGLangEngine(support.options(variant, **cut), release_weights=True)
    try:
        parameters, rank = engine.parameters(), torch.distributed.get_rank()
        assert actor.region is not None
        single = SingleWeights(
            actor.layout, actor.tensors(), actor.region, engine.layout, parameters, rank, adopt=engine.adopt
        )
        addresses = {name: tensor.data_ptr() for name, tensor in parameters.items()}
        errors, before = [], {}
        for version in range(4):
            engine.wake()
            single.to_rollout(version)
            engine.publish(version)
            samples = engine.generate(support.requests(4, max_new_tokens=8))
            engine.sleep()
            single.to_training()
            if before:
                assert all(torch.equal(before[name], tensor) for name, tensor in actor.tensors().items())
            whole = [np.array([*s.prompt.token_ids, *s.response_ids]) for s in samples]
            scored = [Row(index=i, token_ids=ids, mask=np.arange(len(ids)) > 0) for i, ids in enumerate(whole)]
            ours = [p[len(s.prompt.token_ids) :] for p, s in zip(actor.log_probs(scored), samples, strict=True)]
            errors.append(max(float(np.abs(a - s.log_probs).max()) for a, s in zip(ours, samples, strict=True)))
            actor.update(rows, make_loss(actor.config.algorithm, 16))
            before = {name: tensor.detach().clone() for name, tensor in actor.tensors().items()}
        kept = addresses == {name: tensor.data_ptr() for name, tensor in parameters.items()}
        return {"errors": errors, "kept": kept, "moved": single.way_back["sync/received_bytes"]}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("variant", "world", "train", "cut", "order"),
    [
        ("qwen3_moe", 2, {"pp": 2}, {"tp": 2}, "engine"),
        ("deepseek_moe", 2, {"ep": 2}, {"tp": 2, "ep": 2}, "engine"),
        pytest.param("qwen3_moe_tied", 2, {"ep": 2}, {"tp": 2, "ep": 2}, "megatron", marks=pytest.mark.full),
        pytest.param("mixtral", 4, {"pp": 2, "ep": 2}, {"tp": 2}, "engine", marks=pytest.mark.full),
        pytest.param("qwen2_tied", 4, {"pp": 2}, {"tp": 4}, "megatron", marks=pytest.mark.full),
    ],
)
def test_sglang_generates_from_the_only_copy_of_the_weights(
    pool: WorkerPool, variant: str, world: int, train: dict[str, int], cut: dict[str, int], order: str
) -> None:
    support.folder(variant)
    run = {"variant": variant, "cut": cut, "parallel": train, "optimizer": {"lr": 0.01}}
    for found in pool.run(_generate_from_one_copy, world, model={"parameter_layout": order}, **run):
        assert max(found["errors"]) <= 1e-4
        assert found["kept"]
        assert found["moved"] > 0
