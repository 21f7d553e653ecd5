"""Megatron's models compute what transformers computes, in every layout, padded and packed; gradients too."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import megatron_runs
from tests.distributed.pool import WorkerPool
from tests.models.tiny import make_folder, tiny_folder

LOGITS = 1e-5
GRADIENTS = 1e-5  # relative to the gradient's norm

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2": (2, {"tp": 2, "etp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 ep2 etp1": (2, {"tp": 2, "ep": 2}),
    "tp2 ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2, "etp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}),
    "first stage 1 of 4": (2, {"pp": 2, "first_stage_layers": 1}),
    "last stage 1 of 4, pp3": (3, {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1}),
    "tp4 over 2 kv heads": (4, {"tp": 4, "etp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2, "etp": 2}),
    "cp2 ep2": (2, {"cp": 2, "ep": 2}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "cp4": (4, {"cp": 4}),
}
"""World and `parallel.*`. Only models with experts have EP; a dense model takes no notice of ETP."""
OWN_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 etp1": (2, {"tp": 2}),
    "etp2": (2, {"etp": 2}),
    "tp4 ep2 over 2 kv heads": (4, {"tp": 4, "ep": 2}),
}
"""Those that only parameters in the engine's layout train."""

MODELS = (
    "qwen3_moe",
    "qwen3_moe_tied",
    "qwen3_moe_mixed",
    "mixtral",
    "glm4_moe",
    "glm4_moe_qk_norm",
    "deepseek_moe",
    "moonlight_moe",
    "qwen3",
    "qwen3_tied",
    "qwen2",
    "qwen2_tied",
    "llama",
    "llama_biased",
)
QUICK = {
    ("qwen3_moe", "one rank"),
    ("mixtral", "one rank"),
    ("qwen3", "one rank"),
    ("qwen2", "one rank"),
    ("llama", "one rank"),
    ("qwen2_tied", "tp2"),
    ("llama_biased", "tp2"),
    ("qwen3_moe_tied", "pp2"),
    ("mixtral", "ep2"),
    ("qwen3_moe_mixed", "tp2 ep2 etp1"),
    ("qwen3_moe_mixed", "pp2 vpp2"),
    ("llama", "first stage 1 of 4"),
    ("glm4_moe", "one rank"),
    ("glm4_moe", "tp2 ep2 etp1"),
    ("glm4_moe_qk_norm", "pp2"),
    ("deepseek_moe", "one rank"),
    ("deepseek_moe", "tp2 ep2 etp1"),
    ("moonlight_moe", "tp2 etp1"),
    ("moonlight_moe", "pp2 vpp2"),
    ("qwen3_moe", "tp4 over 2 kv heads"),
    ("qwen3_moe", "tp2 etp1"),
    ("qwen3_moe_mixed", "cp2 ep2"),
    ("qwen2", "cp4"),
    ("deepseek_moe", "cp2 pp2"),
    ("glm4_moe", "cp2 tp2"),
    ("qwen3_moe_tied", "tp4 ep2 over 2 kv heads"),
}
"""One of each kind; the others are `full`."""
QUICK_MEGATRON = {
    ("qwen3_moe", "one rank"),
    ("qwen2_tied", "tp2"),
    ("mixtral", "ep2"),
    ("qwen3_moe_mixed", "tp2 ep2 etp1"),
    ("qwen3", "tp4 over 2 kv heads"),
    ("llama_biased", "pp2"),
    ("moonlight_moe", "cp2"),
}
"""The same with parameters in Megatron's layout."""


def cases() -> list[Any]:
    found = []
    for order, quick, layouts in (
        ("engine", QUICK, {**LAYOUTS, **OWN_LAYOUTS}),
        ("megatron", QUICK_MEGATRON, LAYOUTS),
    ):
        for model in MODELS:
            for name, (_, parallel) in layouts.items():
                if "ep" in parallel and "moe" not in model and model != "mixtral":
                    continue
                marks = () if (model, name) in quick else (pytest.mark.full,)
                found.append(pytest.param(order, model, name, marks=marks, id=f"{order}-{model}-{name}"))
    return found


def make_sequences(vocab: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, length).tolist() for length in (7, 12, 1, 5)]


@cache
def reference(folder: Path, gradients: bool = False) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """transformers' logits of each sequence by itself, and gradients by the checkpoint's names."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = [model(torch.tensor([s])).logits[0] for s in make_sequences()]
    found = {}
    if gradients:
        total = sum((row * megatron_runs.coefficients(i, *row.shape)).sum() for i, row in enumerate(logits))
        total.backward()  # type: ignore[union-attr]
        found = {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}
    return [row.detach().numpy() for row in logits], found


def check_logits(ranks: list[dict[str, Any]], expected: list[np.ndarray], tolerance: float = LOGITS) -> None:
    holders = [rank["logits"] for rank in ranks if rank["logits"]]
    assert holders
    for logits in holders:
        assert len(logits) == len(expected)
        for found, row in zip(logits, expected, strict=True):
            np.testing.assert_allclose(found, row, rtol=0, atol=tolerance)
    assert all(rank["repeat"] == 0 for rank in ranks)


def close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    scale = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) <= GRADIENTS * max(scale, 1e-3), what


@pytest.mark.parametrize(("order", "model", "layout"), cases())
def test_logits_equal_transformers_padded_and_packed(pool: WorkerPool, order: str, model: str, layout: str) -> None:
    folder = tiny_folder(model)
    world, parallel = {**LAYOUTS, **OWN_LAYOUTS}[layout]
    expected, _ = reference(folder)
    found = pool.run(
        megatron_runs.run_model,
        world,
        folder=folder,
        parallel=for_model(model, parallel),
        sequences=make_sequences(),
        packed=(False, True),
        parameter_layout=order,
    )
    for ranks in map(list, zip(*found, strict=True)):
        check_logits(ranks, expected)
        for rank in ranks:
            assert rank["shapes"] == rank["layout"]


def for_model(model: str, parallel: Mapping[str, Any]) -> dict[str, Any]:
    dense = "moe" not in model and model != "mixtral"
    return {**parallel, "etp": 1} if dense else dict(parallel)


@pytest.mark.parametrize(
    "model",
    [
        "qwen3_moe_mixed",
        "glm4_moe_qk_norm",
        "deepseek_moe",
        "moonlight_moe",
        "llama_biased",
        *(pytest.param(m, marks=pytest.mark.full) for m in MODELS),
    ],
)
@pytest.mark.parametrize("order", ["engine", "megatron"])
def test_gradients_equal_transformers_padded_and_packed(pool: WorkerPool, order: str, model: str) -> None:
    folder = tiny_folder(model)
    (forms,) = pool.run(
        megatron_runs.run_model,
        1,
        folder=folder,
        parallel={},
        sequences=make_sequences(),
        packed=(False, True),
        backward=True,
        parameter_layout=order,
    )
    for rank in forms:
        check_gradients(model, rank)


def check_gradients(model: str, rank: dict[str, Any]) -> None:
    """On one rank, with its logits."""
    expected, gradients = reference(tiny_folder(model), gradients=True)
    check_logits([rank], expected)
    compared = 0
    for name, gradient in rank["tensor_grads"].items():
        if name in gradients:  # transformers fuses experts in memory
            close(gradient, gradients[name], name)
            compared += 1
    assert compared >= 4 * 6
    for name, fused in gradients.items():
        if name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, gradient in enumerate(fused):
                own = prefix.replace("mlp.experts", "block_sparse_moe.experts") if model == "mixtral" else prefix
                close(
                    rank["tensor_grads"][f"{own}{expert}.{'w2' if model == 'mixtral' else 'down_proj'}.weight"],
                    gradient,
                    f"{name}[{expert}]",
                )


@pytest.mark.parametrize("order", ["engine", pytest.param("megatron", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3_moe_mixed", "tp2 ep2 etp1"),
        ("llama_biased", "pp2"),
        *(pytest.param(m, n, marks=pytest.mark.full) for m in ("qwen3_moe", "mixtral") for n in LAYOUTS),
    ],
)
def test_packed_gradients_equal_padded_ones(pool: WorkerPool, order: str, model: str, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    for one, other in pool.run(
        megatron_runs.run_model,
        world,
        folder=tiny_folder(model),
        parallel=for_model(model, parallel),
        sequences=make_sequences(),
        packed=(False, True),
        backward=True,
        parameter_layout=order,
    ):
        assert one["grads"].keys() == other["grads"].keys()
        for name, gradient in one["grads"].items():
            close(other["grads"][name], gradient, name)


LLAMA3 = {"factor": 3.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}


@pytest.mark.parametrize(
    ("model", "kind", "factors", "layout"),
    [
        ("llama", "llama3", LLAMA3, "one rank"),
        ("llama", "linear", {"factor": 2.5}, "one rank"),
        ("qwen3", "yarn", YARN, "cp2"),
        ("qwen3_moe", "yarn", {**YARN, "attention_factor": 0.8, "truncate": False}, "one rank"),
        pytest.param("glm4_moe", "yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "tp2", marks=pytest.mark.full),
        pytest.param("moonlight_moe", "linear", {"factor": 2.5}, "one rank", marks=pytest.mark.full),
        pytest.param("moonlight_moe", "llama3", LLAMA3, "one rank", marks=pytest.mark.full),
        pytest.param("moonlight_moe", "yarn", {**YARN, "attention_factor": 1.3}, "cp2", marks=pytest.mark.full),
    ],
)
def test_scaled_rotary_positions(
    pool: WorkerPool, tmp_path: Path, model: str, kind: str, factors: dict[str, Any], layout: str
) -> None:
    make_folder(tmp_path, model, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **factors})
    plain, _ = reference(tiny_folder(model))
    expected, _ = reference(tmp_path)
    assert max(np.abs(a - b).max() for a, b in zip(plain, expected, strict=True)) > 1e-3
    world, parallel = LAYOUTS[layout]
    found = pool.run(
        megatron_runs.run_model,
        world,
        folder=tmp_path,
        parallel=for_model(model, parallel),
        sequences=make_sequences(),
        packed=(True,),
    )
    check_logits([rank for (rank,) in found], expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(pool: WorkerPool, recompute: str) -> None:
    run = {"parallel": {}, "sequences": make_sequences(), "packed": (True,), "parameter_layout": "engine"}
    kwargs = {"folder": tiny_folder("qwen3_moe"), **run}
    ((plain,),) = pool.run(megatron_runs.run_model, 1, backward=True, **kwargs)
    ((again,),) = pool.run(megatron_runs.run_model, 1, backward=True, recompute=recompute, **kwargs)
    assert plain["grads"].keys() == again["grads"].keys()
    for name, gradient in plain["grads"].items():
        np.testing.assert_array_equal(again["grads"][name], gradient, name)


@pytest.mark.parametrize("order", ["engine", "megatron"])
def test_bfloat16_forward_and_backward(pool: WorkerPool, order: str) -> None:
    folder = tiny_folder("qwen3_moe_mixed")
    expected, _ = reference(folder)
    found = pool.run(
        megatron_runs.run_model,
        2,
        folder=folder,
        parallel={"tp": 2, "ep": 2},
        sequences=make_sequences(),
        packed=(True,),
        backward=True,
        dtype="bfloat16",
        parameter_layout=order,
    )
    scale = float(np.mean([np.abs(row).mean() for row in expected]))
    for (rank,) in found:  # a token whose experts are near a tie may go to others in bfloat16
        errors = [np.abs(a - b).mean() for a, b in zip(rank["logits"], expected, strict=True)]
        assert np.mean(errors) < 0.05 * scale
        assert rank["shapes"] == rank["layout"]
        assert {dtype for _, dtype in rank["shapes"].values()} == {"bfloat16"}
        assert all(np.isfinite(gradient).all() for gradient in rank["grads"].values())
