"""Hugging Face → Megatron → Hugging Face is bit-identical, for every family and layout, through real modules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from hybridrl.models.families import load_spec, weight_map
from tests.distributed import weights_runs
from tests.distributed.golden_runs import same_bits
from tests.distributed.pool import WorkerPool
from tests.models.tiny import VARIANTS, read_config, tiny_folder

LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "etp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 ep2 etp1": (2, {"tp": 2, "ep": 2}),
    "tp2 ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2, 3 layers first": (2, {"pp": 2, "first_stage_layers": 3}),
    "pp3, 2 layers last": (3, {"pp": 3, "last_stage_layers": 2}),
    "tp4 over 2 kv heads": (4, {"tp": 4, "etp": 4}),
}
QUICK = {
    ("qwen3_moe", "one rank"),
    ("llama_biased", "tp2"),
    ("qwen2_tied", "pp3, 2 layers last"),
    ("qwen3_moe_tied", "pp4"),
    ("mixtral", "pp2 ep2"),
    ("qwen3_moe_mixed", "tp2 ep2 etp1"),
    ("qwen3_moe_tied", "pp2 vpp2"),
    ("qwen3", "tp4 over 2 kv heads"),
    ("llama", "dp2"),
    ("deepseek_moe", "tp2 ep2 etp1"),
    ("moonlight_moe", "pp2 vpp2"),
    ("glm4_moe", "pp2 ep2"),
}
"""One of each kind; the others are `full`."""
QUICK_MEGATRON = {
    ("deepseek_moe", "tp2"),
    ("qwen3_moe", "tp2 ep2 etp2"),
    ("mixtral", "pp2 ep2"),
    ("qwen3", "tp4 over 2 kv heads"),
}
"""The same with parameters in Megatron's layout."""


def cases() -> list[Any]:
    found = []
    for order, quick in (("engine", QUICK), ("megatron", QUICK_MEGATRON)):
        for variant in VARIANTS:
            for name, (_, parallel) in LAYOUTS.items():
                if "ep" in parallel and "moe" not in variant and variant != "mixtral":
                    continue
                marks = () if (variant, name) in quick else (pytest.mark.full,)
                found.append(pytest.param(order, variant, name, marks=marks, id=f"{order}-{variant}-{name}"))
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(("order", "variant", "layout"), cases())
def test_round_trip_is_bit_identical(pool: WorkerPool, tmp_path: Path, order: str, variant: str, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    source, out = tiny_folder(variant), tmp_path / "out"
    pool.run(weights_runs.round_trip, world, folder=source, out=out, parallel=parallel, order=order)
    ours, theirs = tensors(out), tensors(source)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_round_trip_in_bfloat16_loads_in_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    source, out = tiny_folder("qwen3_moe", "bfloat16"), tmp_path / "out"
    pool.run(weights_runs.round_trip, 2, folder=source, out=out, parallel={"pp": 2}, dtype="bfloat16")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, source))
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


def test_prediction_layers_are_left_out_and_the_configuration_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    plain, source, out = tiny_folder("deepseek_moe"), tmp_path / "source", tmp_path / "out"
    source.mkdir()
    config = {**read_config(plain), "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    extra = {t.name: torch.ones(t.shape) for t in weight_map(load_spec(source)) if t.layer == 4}
    assert len(extra) > 24
    save_file({**tensors(plain), **extra}, source / "model.safetensors")
    pool.run(weights_runs.round_trip, 1, folder=source, out=out, parallel={})
    ours, theirs = tensors(out), tensors(plain)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    assert read_config(out)["num_nextn_predict_layers"] == 0


def test_copies_that_differ_are_found(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(weights_runs.check_replicas, 4, folder=tiny_folder("qwen3_tied"), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_rank_that_cannot_write_fails_the_export_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    source, out = tiny_folder("mixtral"), tmp_path / "out"
    told = pool.run(weights_runs.export_on_a_full_disk, 2, folder=source, out=out)
    assert len(set(told)) == 1
    assert "rank 1" in told[0]
    assert "No space left on device" in told[0]
    ours, theirs = tensors(out), tensors(source)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
