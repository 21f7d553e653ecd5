"""Megatron's distributed checkpoint of either parameter layout loads into either, over other parallel sizes too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import checkpoint_runs
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder

ENGINE, MEGATRON = ({"parameter_layout": name, "vocab_multiple": 8} for name in ("engine", "megatron"))
ONE: tuple[int, dict[str, int]] = (1, {})
TP2, TP4 = (2, {"tp": 2, "etp": 2}), (4, {"tp": 4, "etp": 4})
EP2, EP2_ETP2 = (2, {"tp": 2, "ep": 2}), (4, {"tp": 2, "ep": 2, "etp": 2})
PP2_EP2 = (4, {"pp": 2, "ep": 2})
OPTIMIZER = {"distributed": True, "lr": 1e-3}
Place = tuple[dict[str, Any], tuple[int, dict[str, int]]]


def check(pool: WorkerPool, tmp_path: Path, model: str, saved: Place, loaded: Place, moments: bool) -> None:
    folder, out = tiny_folder(model), tmp_path / "checkpoint"
    dense = "moe" not in model and model != "mixtral"
    told = []
    for run, (layout, (world, parallel)) in ((checkpoint_runs.save, saved), (checkpoint_runs.load, loaded)):
        place = {"out" if run is checkpoint_runs.save else "saved": out}
        options = {"parallel": {**parallel, "etp": 1} if dense else parallel, "model": layout, "optimizer": OPTIMIZER}
        told.append(pool.run(run, world, folder=folder, moments=moments, **place, **options))
    expected = told[0][0]
    for found in told[1]:
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
        for ours, theirs in zip(found["metrics"], expected["metrics"][: 2 if moments else 1], strict=False):
            assert ours["loss/total"] == pytest.approx(theirs["loss/total"], abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("qwen3_moe", (ENGINE, TP4), (MEGATRON, ONE)),
        ("qwen3_moe", (MEGATRON, EP2_ETP2), (ENGINE, TP2)),
        ("llama_biased", (MEGATRON, (4, {"tp": 4})), (ENGINE, (2, {"tp": 2}))),
        ("llama_biased", (ENGINE, (4, {"tp": 4})), (ENGINE, ONE)),
        pytest.param("qwen3_moe_mixed", (ENGINE, PP2_EP2), (MEGATRON, EP2), marks=pytest.mark.full),
        pytest.param("mixtral", (ENGINE, ONE), (ENGINE, EP2_ETP2), marks=pytest.mark.full),
        pytest.param("qwen3_moe", (MEGATRON, TP4), (ENGINE, TP4), marks=pytest.mark.full),
        pytest.param("qwen2", (ENGINE, (2, {"tp": 2})), (ENGINE, (4, {"tp": 4})), marks=pytest.mark.full),
        pytest.param("qwen3_moe", (ENGINE, (2, {"tp": 2})), (MEGATRON, (2, {"ep": 2})), marks=pytest.mark.full),
    ],
)
def test_weights_load_into_another_layout(
    pool: WorkerPool, tmp_path: Path, model: str, saved: Place, loaded: Place
) -> None:
    check(pool, tmp_path, model, saved, loaded, moments=False)


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("qwen3_moe", (ENGINE, EP2), (MEGATRON, (2, {"ep": 2}))),
        ("qwen3_moe", (MEGATRON, EP2_ETP2), (ENGINE, EP2)),
        pytest.param("llama_biased", (ENGINE, (4, {"tp": 4})), (MEGATRON, (2, {})), marks=pytest.mark.full),
        pytest.param("llama_biased", (MEGATRON, (2, {})), (ENGINE, (4, {"tp": 4})), marks=pytest.mark.full),
    ],
)
def test_moments_load_into_another_layout(
    pool: WorkerPool, tmp_path: Path, model: str, saved: Place, loaded: Place
) -> None:
    check(pool, tmp_path, model, saved, loaded, moments=True)
