"""One copy of the weights: an engine with the trainer's layout reads the trainer's storage, whatever happens to it."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hybridrl.models.families import weight_map
from hybridrl.models.spec import MoeSpec
from tests.distributed import aliasing_runs
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder
from tests.reshard.simulated import MOE

WORLDS: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "one rank": (1, {}, {}),
    "dp2": (2, {}, {}),
    "ep2": (2, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    "tp2": (2, {"tp": 2, "etp": 2}, {"tp": 2}),
    "tp2, two replicas": (4, {"tp": 2, "etp": 2}, {"tp": 2}),
    "tp4 over 2 kv heads": (4, {"tp": 4, "etp": 4}, {"tp": 4}),
    "tp4 ep2": (4, {"tp": 4, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2}),
}
ENGINE = {"parameter_layout": "engine"}
QUICK = {
    ("qwen3_moe", "one rank", True, "float32"),
    ("qwen3_moe", "ep2", True, "bfloat16"),
    ("qwen3_moe_tied", "dp2", False, "float32"),
    ("mixtral", "tp2", True, "float32"),
    ("qwen3_moe", "tp4 over 2 kv heads", True, "bfloat16"),
    ("glm4_moe", "ep2", True, "float32"),
    ("qwen2", "dp2", False, "bfloat16"),
}


def cases() -> list[Any]:
    found = []
    for model in ("qwen3_moe", "qwen3_moe_tied", "mixtral", "glm4_moe", "qwen3_tied", "qwen2"):
        for world, (_, train, _) in WORLDS.items():
            if "ep" in train and "moe" not in model and model != "mixtral":
                continue
            for distributed in (False, True):
                for dtype in ("float32", "bfloat16"):
                    if model == "glm4_moe" and dtype == "bfloat16":
                        continue  # its engine has a router in float32
                    case = (model, world, distributed, dtype)
                    name = f"{model}-{world}-{'sharded' if distributed else 'whole'}-{dtype}"
                    found.append(pytest.param(*case, marks=() if case in QUICK else pytest.mark.full, id=name))
    return found


def options(model: str, world: str, distributed: bool, dtype: str) -> dict[str, Any]:
    _, train, rollout = WORLDS[world]
    dense = "moe" not in model and model != "mixtral"
    return {
        "rollout": rollout,
        "parallel": {**train, "etp": 1} if dense else train,
        "optimizer": {"distributed": distributed, "lr": 0.02},  # seen in bfloat16 too
        "model": {**ENGINE, "dtype": dtype, "router_bias_rate": 0.01 if model == "glm4_moe" else 0.0},
    }


@pytest.mark.parametrize(("model", "world", "distributed", "dtype"), cases())
def test_updates_are_in_the_engine_without_a_copy(
    pool: WorkerPool, model: str, world: str, distributed: bool, dtype: str
) -> None:
    folder = tiny_folder(model, dtype)
    given = options(model, world, distributed, dtype)
    for found in pool.run(aliasing_runs.through_steps, WORLDS[world][0], folder=folder, **given):
        assert all(found["agreed"])
        assert found["changed"]
        assert found["kept"]
        assert found["moved"] == [0, 0, 0]
        assert found["aliased"] == found["bytes"]
        assert found["plan"] == (0, 0, 0)


@pytest.mark.parametrize(("world", "distributed", "dtype"), [("ep2", True, "float32"), ("dp2", False, "bfloat16")])
def test_sharing_outlives_saves_loads_and_released_gradients(
    pool: WorkerPool, tmp_path: Path, world: str, distributed: bool, dtype: str
) -> None:
    given = options("qwen3_moe", world, distributed, dtype)
    other = tiny_folder("qwen3_moe", dtype, initializer_range=0.1)
    run = {"folder": tiny_folder("qwen3_moe", dtype), "other": other, "out": tmp_path / "out"}
    for lost in pool.run(aliasing_runs.through_events, WORLDS[world][0], **run, **given):
        assert lost == []


def phases() -> list[Any]:
    quick = {("keep", True, "bfloat16"), ("offload", False, "float32"), ("single", True, "float32")}
    every = product(("keep", "offload", "single"), (False, True), ("float32", "bfloat16"))
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.full) for case in every]


@pytest.mark.parametrize(("parameters", "distributed", "dtype"), phases())
def test_sharing_outlives_three_steps_of_phases_and_finds_a_careless_caller(
    pool: WorkerPool, tmp_path: Path, parameters: str, distributed: bool, dtype: str
) -> None:
    given = {
        "memory": {"parameters": parameters, "optimizer": "host", "margin_bytes": 0, "verify": True},
        "optimizer": {"distributed": distributed, "lr": 0.02},
        "model": {**ENGINE, "dtype": dtype},
    }
    other = tiny_folder("qwen3_moe", dtype, initializer_range=0.1)
    run = {"folder": tiny_folder("qwen3_moe", dtype), "other": other, "arena": tmp_path}
    for found in pool.run(aliasing_runs.through_phases, 2, **run, **given):
        assert found["lost"] == []
        assert found["kept"] == [True] * 3
        assert found["aliased"] == [found["aliased"][0]] * 3
        assert found["aliased"][0] > 0
        assert found["common"] == [found["common"][0]] * 3
        assert sum(name.endswith("mlp.experts.gate_up_proj") for name in found["common"][0]) == 4  # in every layer
        assert found["left"] == [(0, 0, 0)] * 3
        assert "rank 1: " in found["refused"]
        assert "layers.1.mlp.experts.w13 was given another storage" in found["refused"]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_weights_are_not_undone_by_older_masters(pool: WorkerPool, dtype: str, distributed: bool) -> None:
    given = options("qwen3_moe", "dp2", distributed, dtype)
    other = tiny_folder("qwen3_moe", dtype, initializer_range=0.1)
    run = {"folder": tiny_folder("qwen3_moe", dtype), "other": other}
    assert all(pool.run(aliasing_runs.loaded_weights_stay, 2, **run, **given))


@pytest.mark.parametrize("way", [*aliasing_runs.CARELESS, None])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_parameter_that_lies_elsewhere_is_refused_on_all_ranks(
    pool: WorkerPool, way: str | None, distributed: bool
) -> None:
    folder, given = tiny_folder("qwen3_moe"), {"optimizer": {"distributed": distributed}, "model": ENGINE}
    name = "mlp.experts.w13_weight " if way is None else "mlp.experts.w13 "
    for text, touched in pool.run(aliasing_runs.careless, 2, folder=folder, way=way, rank=1, **given):
        assert "rank 1: " in text
        assert f"layers.0.{name}was given another storage" in text
        assert not touched


def test_an_engine_that_reads_other_tensors_is_refused(pool: WorkerPool) -> None:
    (told,) = pool.run(aliasing_runs.deaf_engine, 1, folder=tiny_folder("qwen3_moe"))
    assert "destination model.layers.0.mlp.experts.w13_weight was to share the storage of source" in told


@pytest.mark.parametrize("release", [False, True])
def test_the_embedded_engine_shares_what_lies_alike_and_never_frees_it(pool: WorkerPool, release: bool) -> None:
    folder, layer = tiny_folder("qwen3_moe"), "model.layers.2."
    for found in pool.run(aliasing_runs.with_transformers, 2, folder=folder, release=release, model=ENGINE):
        assert max(found["errors"]) <= 1e-4
        shared = {name.removeprefix(layer) for name in found["shared"] if name.startswith(layer)}
        assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.o_proj.weight"} <= shared
        assert not shared & {f"self_attn.{n}_proj.weight" for n in "qkv"}  # parts of one parameter in training
        assert "model.embed_tokens.weight" not in found["shared"]  # padded in training


def test_work_of_a_sync_does_not_depend_on_the_models_size(pool: WorkerPool) -> None:
    moe = MoeSpec(num_experts=8, top_k=2, ffn_size=64, norm_topk_prob=True, layers=(True,) * 4)
    small = replace(MOE, moe=moe, hidden_size=64, vocab_size=512, head_dim=16)
    large = replace(small, moe=replace(moe, ffn_size=640), hidden_size=320, vocab_size=1024)
    assert weight_map(large).nbytes > 10 * weight_map(small).nbytes
    for works in pool.run(aliasing_runs.work_of_sync, 2, specs=[small, large], alias=True):
        assert works == [([], 0, 0)] * 2
    for (_, fewer, _), (_, more, _) in pool.run(aliasing_runs.work_of_sync, 2, specs=[small, large], alias=False):
        assert more > 10 * fewer > 0
