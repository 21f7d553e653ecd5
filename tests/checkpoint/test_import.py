"""A Hugging Face folder becomes a checkpoint of weights alone, and an export gives the same bits back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint import export, import_
from hybridrl.checkpoint.files import RankWriter
from hybridrl.checkpoint.manifest import file_problems, read_manifest
from tests.checkpoint.test_huggingface_export import bits
from tests.checkpoint.test_huggingface_import import changed
from tests.models.tiny import VARIANTS, make_folder, tiny_folder

REPOSITORY = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


def round_trip(source: Path, into: Path, *export_options: str) -> Path:
    assert import_.main([str(source), str(into / "imported")]) == 0
    assert export.main([str(into / "imported"), str(into / "out"), "--source", str(source), *export_options]) == 0
    return into / "out"


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_of_an_import_is_the_same_to_the_bit(variant: str, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    out = round_trip(source, tmp_path)
    assert bits(out) == bits(source)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    (folder,) = (tmp_path / "imported").iterdir()
    files = read_manifest(folder).files
    assert file_problems(folder, files, files) == []


@pytest.mark.parametrize("mixed", [False, True])
def test_dtypes_and_sharded_files_survive(mixed: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_folder(source, "deepseek_moe", "bfloat16", max_shard_size="5GB" if mixed else "20KB")
    if mixed:  # as real ones are: the router's correction in float32
        tensors = load_file(source / "model.safetensors")
        bias = next(name for name in tensors if name.endswith("e_score_correction_bias"))
        tensors[bias] = tensors[bias].float() + 1e-3
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert bits(round_trip(source, tmp_path)) == bits(source)


def test_prediction_layers_come_back_too(tmp_path: Path) -> None:
    """transformers makes none, so their tensors are those that the weight map names."""
    from hybridrl.models.families import load_spec, weight_map

    def add(tensors: Tensors) -> None:
        (tmp_path / "probe").mkdir()
        (tmp_path / "probe" / "config.json").write_text((tiny_folder("glm4_moe") / "config.json").read_text())
        config = (
            (tmp_path / "probe" / "config.json")
            .read_text()
            .replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1')
        )
        (tmp_path / "probe" / "config.json").write_text(config)
        for tensor in weight_map(load_spec(tmp_path / "probe")):
            tensors.setdefault(tensor.name, torch.randn(tensor.shape))

    source = changed(tiny_folder("glm4_moe"), tmp_path / "source", add, {"num_nextn_predict_layers": 1})
    assert len(load_file(source / "model.safetensors")) > len(load_file(tiny_folder("glm4_moe") / "model.safetensors"))
    assert bits(round_trip(source, tmp_path)) == bits(source)


def test_everything_that_is_wrong_is_told_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        del tensors["model.layers.3.mlp.experts.7.up_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(33)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float64)

    monkeypatch.setattr(RankWriter, "write", lambda *_: pytest.fail("it was written"))
    source = changed(tiny_folder("qwen3_moe"), tmp_path / "model", change)
    for words in ([str(source)], [str(source), str(tmp_path / "out")]):
        assert import_.main(words) == 1
        told = capsys.readouterr().err
        assert "model.layers.0.mlp.extra.weight in model.safetensors is unknown" in told
        assert "model.layers.3.mlp.experts.7.up_proj.weight is missing" in told
        assert "model.norm.weight has shape [33], the configuration implies [32]" in told
        assert "lm_head.weight is F64" in told
        assert not (tmp_path / "out").exists()


def test_a_check_makes_nothing_and_a_folder_that_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tiny_folder("llama_biased")
    assert import_.main([str(source)]) == 0
    assert "can be imported: 66 tensors" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("here")
    assert import_.main([str(source), "out"]) == 1
    assert "out is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert import_.main([str(tmp_path / "nowhere"), "new"]) == 1
    assert "no config.json" in capsys.readouterr().err


def test_the_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-m", "hybridrl.checkpoint.import_", str(tiny_folder("llama")), str(tmp_path / "out")]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "checkpoint.load=weights" in ended.stdout
