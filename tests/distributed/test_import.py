"""Runs of any layout start from an imported checkpoint as from the Hugging Face folder that it was made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint.export import CheckpointTensors
from hybridrl.checkpoint.manifest import read_manifest
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from tests.distributed import save_runs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_resume import BY_LENGTH, check_alike, launch, steady
from tests.models.tiny import tiny_folder

PLACES: list[Any] = [
    ("qwen3_moe", "float32", 2, {"parallel": {"pp": 2}}),
    pytest.param("qwen3_moe", "float32", 2, {"parallel": {"tp": 2, "ep": 2}}, marks=pytest.mark.full),
    pytest.param("glm4_moe", "float32", 4, {"parallel": {"tp": 2, "pp": 2}}, marks=pytest.mark.full),
    pytest.param("deepseek_moe", "bfloat16", 2, {"parallel": {"ep": 2}}, marks=pytest.mark.full),
]


def imported(source: Path, out: Path) -> str:
    from hybridrl.checkpoint.import_ import import_checkpoint
    from hybridrl.parallel import compat

    compat.install()
    return str(import_checkpoint(source, out))


@pytest.mark.parametrize(("model", "dtype", "world", "options"), PLACES)
def test_any_layout_reads_an_import_by_two_ranks(
    pool: WorkerPool, tmp_path: Path, model: str, dtype: str, world: int, options: dict[str, Any]
) -> None:
    source, out = tiny_folder(model), tmp_path / "imported"
    (folder,) = set(pool.run(imported, 2, source=source, out=out))
    expected = load_file(source / "model.safetensors")
    assert {"__0_0.distcp", "__1_0.distcp"} < read_manifest(Path(folder)).files.keys()
    tensors = CheckpointTensors(Path(folder))
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    own = {"model": {"vocab_multiple": 8, "dtype": dtype}, "optimizer": {"lr": 0.0}}
    for found in pool.run(save_runs.load, world, folder=source, saved=out, moments=False, **own, **options):
        kept = getattr(torch, dtype)
        for when in ("weights", "after"):  # a step without a learning rate shows what the masters are
            assert found[when].keys() == expected.keys()
            for name, value in found[when].items():
                held = torch.float32 if name.endswith("correction_bias") else kept
                assert torch.equal(value, expected[name].to(held).to(value.dtype)), (when, name)


def test_a_run_from_an_import_is_the_run_from_its_folder(pool: WorkerPool, tmp_path: Path) -> None:
    builtin_folder = builtin.resolve("builtin:tiny_moe", cache_folder())
    other = tmp_path / "other"
    other.mkdir()
    for path in builtin_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors = load_file(other / "model.safetensors")
    save_file({n: t * 1.25 for n, t in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    pool.run(imported, 1, source=other, out=tmp_path / "imported")
    words = ("trainer.steps=2", "warm_start.steps=0", BY_LENGTH)
    expected = launch(pool, tmp_path / "plain", *words, f"model.path={other}")
    start = (f"trainer.resume={tmp_path / 'imported'}", "checkpoint.load=weights")
    assert steady(launch(pool, tmp_path / "from", *words, *start)) == steady(expected)
    check_alike(tmp_path / "from", tmp_path / "plain")
