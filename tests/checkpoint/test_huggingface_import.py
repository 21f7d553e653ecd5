"""Import: the file's bits arrive, only they are read, and whatever does not fit is told before anything is written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint import huggingface_import
from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.checkpoint.safetensors_folder import SafetensorsFolder
from hybridrl.models.families import load_spec, weight_map
from hybridrl.models.weights import Box
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.megatron import MegatronLayout
from tests.models.tiny import VARIANTS, make_folder, tiny_folder
from tests.reshard.simulated import scatter

Tensors = dict[str, torch.Tensor]


def megatron(folder: Path, dtype: str | None = None, **sizes: int) -> MegatronLayout:
    weights = weight_map(load_spec(folder))
    return MegatronLayout(weights, ParallelSizes(**{"world": 1, **sizes}), vocab_multiple=16, dtype=dtype)


def empty(layout: MegatronLayout, rank: int = 0) -> Tensors:
    return {n: torch.full(p.shape, float("nan"), dtype=getattr(torch, p.dtype)) for n, p in layout.params(rank).items()}


def changed(
    folder: Path, into: Path, change: Callable[[Tensors], Any], config: Mapping[str, Any] | None = None
) -> Path:
    """A copy of a folder with changed tensors (and settings)."""
    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**settings, **(config or {})}))
    return into


def refusal(folder: Path, layout: MegatronLayout, params: Tensors, **options: Any) -> str:
    """The message; asserts that nothing was written."""
    before = {name: param.clone() for name, param in params.items()}
    with pytest.raises(WeightError) as caught:
        import_weights(folder, layout, params, 0, **options)
    assert all(torch.equal(params[n].view(torch.uint8), before[n].view(torch.uint8)) for n in params)
    return str(caught.value)


@pytest.mark.parametrize("sizes", [{}, {"world": 4, "tp": 4}, {"world": 8, "tp": 2, "pp": 4}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_gets_its_boxes_and_zero_padding(variant: str, sizes: dict[str, int]) -> None:
    folder = tiny_folder(variant)
    layout = megatron(folder, **sizes)
    expected = scatter(layout, load_file(folder / "model.safetensors"))
    for rank in layout.ranks:
        params = empty(layout, rank)
        for _ in range(2):
            import_weights(folder, layout, params, rank)
        assert all(torch.equal(params[name], expected[rank][name]) for name in params)


def test_sharded_files_with_an_index_are_read(tmp_path: Path) -> None:
    make_folder(tmp_path, "qwen3_moe", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    layout = megatron(tmp_path)
    params = empty(layout)
    import_weights(tmp_path, layout, params, 0)
    expected = scatter(layout, load_file(tiny_folder("qwen3_moe") / "model.safetensors"))[0]
    assert all(torch.equal(params[name], expected[name]) for name in params)


def test_only_a_ranks_own_boxes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("qwen3_moe")
    layout = megatron(folder, world=8, tp=2, ep=4, pp=2)
    real, elements = SafetensorsFolder.read, []

    def read(self: SafetensorsFolder, name: str, box: Box | None = None) -> torch.Tensor:
        value = real(self, name, box)
        elements.append(value.numel())
        return value

    monkeypatch.setattr(SafetensorsFolder, "read", read)
    params = empty(layout, 5)
    import_weights(folder, layout, params, 5)
    assert sum(elements) == sum(piece.box.size for piece in layout.pieces(5))
    assert sum(elements) < sum(t.size for t in layout.weights) / 2


def test_names_shapes_and_parameters_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        del tensors["model.layers.3.mlp.experts.7.up_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(33)

    folder = changed(tiny_folder("qwen3_moe"), tmp_path / "model", change)
    layout = megatron(folder)
    params = empty(layout)
    params["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] = torch.zeros(2)
    del params["decoder.layers.1.input_layernorm.weight"]
    params["output_layer.weight"] = torch.zeros(64, 31)
    told = refusal(folder, layout, params)
    for words in (
        "model.layers.0.mlp.extra.weight in model.safetensors is unknown",
        "model.layers.3.mlp.experts.7.up_proj.weight is missing",
        "model.norm.weight has shape [33], the configuration implies [32]",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight is unknown to the layout",
        "decoder.layers.1.input_layernorm.weight is missing",
        "output_layer.weight has shape [64, 31], the layout expects [64, 32]",
    ):
        assert words in told


def test_derived_buffers_are_passed_over(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    folder = changed(tiny_folder("llama"), tmp_path / "model", change)
    layout = megatron(folder)
    import_weights(folder, layout, empty(layout), 0)


def test_other_dtype_is_converted_only_when_asked(tmp_path: Path) -> None:
    folder = tiny_folder("qwen2", "bfloat16")
    layout = megatron(folder, dtype="float32")
    params = empty(layout)
    told = refusal(folder, layout, params)
    assert "51 tensors are bfloat16 in the files and float32 in memory" in told
    import_weights(folder, layout, params, 0, convert=True)
    whole = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    expected = scatter(layout, whole)[0]
    assert all(torch.equal(params[name], expected[name]) for name in params)
    wrong = megatron(folder)  # a layout of bfloat16 parameters
    assert "is float32, the layout expects bfloat16" in refusal(folder, wrong, params, convert=True)


def test_tied_model_may_repeat_its_embedding_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_import, "ROWS_AT_ONCE", 7)

    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors: Tensors) -> None:
        repeat(tensors)
        tensors["lm_head.weight"][49, 31] += 1

    def shorter(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:49].clone()

    good = changed(tiny_folder("qwen3_tied"), tmp_path / "good", repeat)
    layout = megatron(good, world=2, pp=2)
    params = empty(layout, 1)
    import_weights(good, layout, params, 1)
    assert torch.equal(params["output_layer.weight"][:50], load_file(good / "model.safetensors")["lm_head.weight"])
    for name, change in (("differ", differ), ("shorter", shorter)):
        bad = changed(tiny_folder("qwen3_tied"), tmp_path / name, change)
        layout = megatron(bad)
        assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(bad, layout, empty(layout))


def test_broken_files_and_indices_are_named(tmp_path: Path) -> None:
    layout = megatron(tiny_folder("llama"))
    assert "neither model.safetensors nor" in refusal(tmp_path, layout, empty(layout))
    make_folder(tmp_path, "llama", max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    placed = content["weight_map"]
    files = sorted(set(placed.values()))
    moved, renamed = sorted(name for name, file in placed.items() if file == files[0])[:2]
    placed[moved] = files[1]
    placed["other.weight"] = placed.pop(renamed)
    index.write_text(json.dumps(content))
    (tmp_path / files[2]).write_bytes((tmp_path / files[2]).read_bytes()[:100])
    (tmp_path / files[3]).unlink()
    told = refusal(tmp_path, layout, empty(layout))
    assert f"{moved} is in the index, but not in {files[1]}" in told
    assert f"{moved} is in {files[0]}, but not in the index" in told
    assert f"{renamed} is in {files[0]}, but not in the index" in told
    assert f"{tmp_path / files[2]} cannot be read" in told
    assert f"{tmp_path / files[3]} cannot be read" in told
    for broken in ('{"weight_map": {', '{"metadata": {}}', '{"weight_map": 3}'):
        index.write_text(broken)
        assert f"{index} cannot be read" in refusal(tmp_path, layout, empty(layout))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "has both" in refusal(tmp_path, layout, empty(layout))
