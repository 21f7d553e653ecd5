"""Export on one rank: files in standard form, companions, dtypes, and nothing left behind by a failure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from hybridrl.checkpoint import huggingface_export
from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.checkpoint.safetensors_file import SafetensorsFile
from hybridrl.models.families import load_spec, weight_map
from hybridrl.models.weights import Param
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.megatron import MegatronLayout
from tests.models.tiny import VARIANTS, make_folder, read_config, tiny_folder

Tensors = dict[str, torch.Tensor]


def loaded(folder: Path, dtype: str | None = None) -> tuple[MegatronLayout, Tensors]:
    """A one-rank layout and its parameters with the folder's weights."""
    layout = MegatronLayout(weight_map(load_spec(folder)), ParallelSizes(world=1), vocab_multiple=16, dtype=dtype)
    params = {n: torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for n, p in layout.params(0).items()}
    import_weights(folder, layout, params, 0, convert=dtype is not None)
    return layout, params


def bits(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Every tensor of a folder's files, to the bit."""
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n: (t.dtype, tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_gives_the_same_bits_and_transformers_loads_them(variant: str, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    layout, params = loaded(source)
    out = tmp_path / "out"
    export_weights(out, layout, params, 0, source=source)
    assert bits(out) == bits(source)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (out, source))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    with pytest.raises(WeightError, match="is there already"):
        export_weights(out, layout, params, 0, source=source)


def test_special_values_survive_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make_folder(folder, "qwen3_moe", "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    patterns = torch.tensor([0x8000, 0x7F81, 0x7FC1, 0xFFC0 - 1, 0x0001, 0xFF80], dtype=torch.int32).to(torch.int16)
    for tensor in tensors.values():  # -0.0, signalling and quiet NaNs with payloads, a subnormal, -inf
        tensor.view(torch.int16).flatten()[: len(patterns)] = patterns
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layout, params = loaded(folder)
    for bucket in (1, 1000, 2**30):
        export_weights(tmp_path / str(bucket), layout, params, 0, source=folder, bucket_bytes=bucket)
        assert bits(tmp_path / str(bucket)) == bits(folder)


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_files_of_any_size_are_in_standard_form(limit: int, tmp_path: Path) -> None:
    source = tiny_folder("mixtral")
    layout, params = loaded(source)
    export_weights(tmp_path / "out", layout, params, 0, source=source, max_shard_bytes=limit)
    assert bits(tmp_path / "out") == bits(source)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    index = tmp_path / "out" / "model.safetensors.index.json"
    if limit == 10**9:
        assert files == ["model.safetensors"]
        assert not index.exists()
        return
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in layout.weights)
    assert content["weight_map"].keys() == {t.name for t in layout.weights}
    assert sorted(set(content["weight_map"].values())) == files
    for name in files:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held = list(file.keys())
        assert {content["weight_map"][tensor] for tensor in held} == {name}
        assert len(held) == 1 or sum(layout.weights[t].nbytes for t in held) <= limit
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


def test_companions_travel(tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "source", tmp_path / "tokenizer"
    source.mkdir()
    make_folder(source, "qwen3_tied")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "pytorch_model.bin"):
        (source / name).write_text("{}")
    tokenizer.mkdir()
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool.jinja").write_text("tools")
    (tokenizer / "tokenizer.json").write_text('{"other": 1}')
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 9}')
    layout, params = loaded(source)
    export_weights(tmp_path / "own", layout, params, 0, source=source)
    weights = {"model.safetensors", "config.json", "generation_config.json"}
    own = {path.name for path in (tmp_path / "own").iterdir()}
    assert own == weights | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    export_weights(tmp_path / "other", layout, params, 0, source=source, tokenizer=tokenizer)
    other = {path.name for path in (tmp_path / "other").iterdir()}
    assert other == weights | {"tokenizer.json", "additional_chat_templates"}
    assert (tmp_path / "other" / "tokenizer.json").read_text() == '{"other": 1}'
    for out in ("own", "other"):
        assert GenerationConfig.from_pretrained(tmp_path / out).eos_token_id == [1, 2]


def test_dtype_of_the_source_is_kept_tensor_by_tensor(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    make_folder(source, "qwen3_moe", "bfloat16")
    tensors = load_file(source / "model.safetensors")
    wide = {n: t.float() if ".gate.weight" in n else t for n, t in tensors.items()}
    save_file(wide, source / "model.safetensors", metadata={"format": "pt"})
    layout, params = loaded(source, dtype="float32")
    export_weights(tmp_path / "out", layout, params, 0, source=source, dtype="source")
    assert bits(tmp_path / "out") == bits(source)
    assert len({dtype for dtype, _, _ in bits(source).values()}) == 2
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_configured_dtype_stays_true(tmp_path: Path) -> None:
    source = tiny_folder("qwen2", "bfloat16")
    layout, params = loaded(source, dtype="float32")
    export_weights(tmp_path / "wide", layout, params, 0, source=source)
    assert {dtype for dtype, _, _ in bits(tmp_path / "wide").values()} == {torch.float32}
    assert read_config(tmp_path / "wide") == {**read_config(source), "dtype": "float32"}
    export_weights(tmp_path / "narrow", layout, params, 0, source=source, dtype="bfloat16")
    assert bits(tmp_path / "narrow") == bits(source)
    assert read_config(tmp_path / "narrow") == read_config(source)


def test_source_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    layout, params = loaded(tiny_folder("qwen3_tied"))
    with pytest.raises(WeightError, match=r"lm_head.weight is None here, \(50, 32\)"):
        export_weights(tmp_path / "out", layout, params, 0, source=tiny_folder("qwen3"))
    with pytest.raises(WeightError, match=r"config.json does not exist"):
        export_weights(tmp_path / "out", layout, params, 0, source=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_parameter_that_the_layout_does_not_know_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = tiny_folder("qwen3_moe")
    layout, params = loaded(source)
    params["decoder.layers.0.self_attention.linear_qgkv.weight"] = params.pop(
        "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    with pytest.raises(WeightError, match=r"linear_qkv.weight is missing\n.*linear_qgkv.weight is unknown"):
        export_weights(tmp_path / "out", layout, params, 0, source=source)
    assert list(tmp_path.iterdir()) == []


def test_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_folder("mixtral")
    layout, params = loaded(source)
    real = SafetensorsFile.write

    def write(self: SafetensorsFile, name: str, value: torch.Tensor) -> None:
        if "layers.2" in name:
            raise OSError(28, "No space left on device")
        real(self, name, value)

    monkeypatch.setattr(huggingface_export.SafetensorsFile, "write", write)
    with pytest.raises(WeightError, match="No space left on device"):
        export_weights(tmp_path / "out", layout, params, 0, source=source, max_shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


def test_file_refuses_what_its_header_does_not_say(tmp_path: Path) -> None:
    value = torch.ones(2, 3)
    tensors = [Param("half", (3,), "bfloat16"), Param("full", (2, 3), "float32")]
    with SafetensorsFile(tmp_path / "good", tensors) as file:
        file.write("half", value[0].bfloat16())
        file.write("full", value)
    written = load_file(tmp_path / "good")
    assert torch.equal(written["half"], value[0].bfloat16())
    assert torch.equal(written["full"], value)

    def incomplete(*written: Any) -> None:
        with SafetensorsFile(tmp_path / "bad", tensors) as file:
            for name, tensor in written:
                file.write(name, tensor)

    with pytest.raises(ValueError, match="half is"):
        incomplete(("half", value))
    with pytest.raises(ValueError, match="1 tensors were never written, half first"):
        incomplete(("full", value))
