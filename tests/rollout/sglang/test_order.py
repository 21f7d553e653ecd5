"""Modules whose parameters are in another order than a checkpoint's are refused by name, whatever says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.models.families import load_spec, weight_map
from hybridrl.reshard.golden import box_slices, write_piece
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.rollout.parameters import by_layout
from hybridrl.rollout.sglang.order import PLAIN_METHODS, REORDERING, SHUFFLED, order_problems
from hybridrl.rollout.sglang.probe import probe
from tests.models.tiny import tiny_folder
from tests.rollout.sglang.support import needs_sglang


class UnquantizedFusedMoEMethod:
    """A stand-in for SGLang's, under its name."""

    def __init__(self, backend: str = "triton") -> None:
        self.runner = SimpleNamespace(runner_backend=SimpleNamespace(value=backend))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


class Served(torch.nn.Module):
    """A stand-in for SGLang's model, in whose modules the layout's parameters are, and its loader."""

    def __init__(self, layout: SGLangLayout) -> None:
        super().__init__()
        self.layout = layout
        for name, param in layout.params(0).items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(param.shape), requires_grad=False))
            module.quant_method = UnquantizedFusedMoEMethod()  # type: ignore[assignment]

    def load_weights(self, pairs: Any) -> None:
        tensors, parameters = dict(pairs), dict(self.named_parameters())
        for piece in self.layout.pieces(0):
            if piece.tensor in tensors:
                write_piece(parameters, piece, tensors[piece.tensor][box_slices(piece.box)])


def served(variant: str) -> Served:
    return Served(SGLangLayout(weight_map(load_spec(tiny_folder(variant))), RolloutSizes(world=1), dtype="float32"))


def experts(model: Served) -> Any:
    return model.get_submodule("model.layers.1.mlp.experts")


def test_a_plain_model_is_taken() -> None:
    assert order_problems(served("qwen3_moe")) == []


@pytest.mark.parametrize("mark", REORDERING)
@pytest.mark.parametrize("owner", ["module", "method"])
def test_a_mark_of_another_order_is_named(mark: str, owner: str) -> None:
    model = served("qwen3_moe")
    setattr(experts(model) if owner == "module" else experts(model).quant_method, mark, True)
    (told,) = order_problems(model)
    assert told == f"model.layers.1.mlp.experts: its parameters are in another order ({mark})"


@pytest.mark.parametrize("mark", SHUFFLED)
def test_a_shuffled_parameter_is_named(mark: str) -> None:
    model = served("qwen3_moe")
    setattr(experts(model).w2_weight, mark, True)
    assert order_problems(model) == [f"model.layers.1.mlp.experts: its w2_weight is in another order ({mark})"]


@pytest.mark.parametrize("backend", ["flashinfer_trtllm", "deep_gemm", "cutlass"])
def test_another_runner_of_experts_is_named(backend: str) -> None:
    model = served("qwen3_moe")
    experts(model).quant_method = UnquantizedFusedMoEMethod(backend)
    (told,) = order_problems(model)
    assert told == f"model.layers.1.mlp.experts: its runner backend {backend} may keep experts in another order"


def test_another_method_is_named() -> None:
    model = served("qwen3_moe")
    model.get_submodule("model.layers.0.self_attn.o_proj").quant_method = SimpleNamespace()  # type: ignore[assignment]
    (told,) = order_problems(model)
    assert told == "model.layers.0.self_attn.o_proj: its SimpleNamespace may keep parameters in another order"


def test_an_intermediate_size_that_was_padded_is_named_with_both_shapes() -> None:
    model = served("qwen3_moe")
    found = dict(model.named_parameters())
    found["model.layers.1.mlp.experts.w13_weight"] = torch.nn.Parameter(torch.zeros(8, 64, 32))
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts\.w13_weight is float32 \[8, 64, 32\] in .*, float32 \[8, 48, 32\]"
    ):
        by_layout(found, model.layout, 0, owner="SGLang's model")


def up_first(layer: Any) -> None:
    layer.w13_weight.data = torch.cat(layer.w13_weight.data.chunk(2, dim=1)[::-1], dim=1)


def interleaved(layer: Any) -> None:
    layer.w13_weight.data = torch.stack(layer.w13_weight.data.chunk(2, dim=1), dim=2).flatten(1, 2)


def tiles(layer: Any) -> None:
    layer.w2_weight.data.copy_(layer.w2_weight.data.unflatten(1, (2, -1)).flip(1).flatten(1, 2))


def experts_reversed(layer: Any) -> None:
    layer.w2_weight.data.copy_(layer.w2_weight.data.flip(0))


def one_element(layer: Any) -> None:
    layer.w2_weight.data[-1, -1, -1] += 1


def padded_rows(layer: Any) -> None:
    layer.w13_weight.data = torch.nn.functional.pad(layer.w13_weight.data, (0, 0, 0, 16))


def replaced(layer: Any) -> None:
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.data.clone(), requires_grad=False)


def keys_first(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(-64, dims=0))  # 64 rows are queries'


def keys_and_values(layer: Any) -> None:
    query, key, value = layer.weight.data.split([64, 16, 16])
    layer.weight.data = torch.cat([query, value, key])


def transposed(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t().contiguous()


PROBED = [
    ("qwen3_moe", "mlp.experts", up_first, "w13_weight: 768 of 768 elements of model.layers.0.mlp.experts.0.gate_proj"),
    ("qwen3_moe", "mlp.experts", interleaved, "w13_weight: "),
    ("qwen3_moe", "mlp.experts", tiles, "w2_weight: "),
    ("qwen3_moe", "mlp.experts", experts_reversed, "w2_weight: "),
    ("qwen3_moe", "mlp.experts", one_element, "w2_weight: 1 of 768 elements of model.layers.0.mlp.experts.7.down_proj"),
    ("qwen3_moe", "mlp.experts", padded_rows, "w13_weight: has shape [8, 64, 32] once it was loaded, expected [8, 48"),
    ("qwen3_moe", "mlp.experts", replaced, "w2_weight: was replaced by another parameter"),
    ("qwen3_moe", "self_attn.qkv_proj", keys_first, "weight: "),
    (
        "qwen3_moe",
        "self_attn.qkv_proj",
        keys_and_values,
        "weight: 512 of 512 elements of model.layers.0.self_attn.k_proj",
    ),
    ("qwen3_moe", "self_attn.o_proj", transposed, "weight: has shape [64, 32] once it was loaded, expected [32, 64]"),
    ("qwen2", "self_attn.o_proj", transposed, "weight: "),  # square, so that no shape tells
    ("qwen3", "mlp.gate_up_proj", transposed, "weight: has shape"),
]


@pytest.mark.parametrize(("variant", "module", "process", "told"), PROBED, ids=lambda v: getattr(v, "__name__", None))
def test_the_probe_finds_every_other_order_that_nothing_tells_of(
    variant: str, module: str, process: Any, told: str
) -> None:
    model = served(variant)
    parameters = dict(model.named_parameters())
    assert probe(model, model.layout, parameters, 0) == []
    model.get_submodule(f"model.layers.0.{module}").quant_method.process_weights_after_loading = process  # type: ignore[union-attr]
    (found,) = probe(model, model.layout, parameters, 0)
    assert found.startswith(f"model.layers.0.{module}.{told}")


@needs_sglang
def test_the_marks_are_names_of_sglangs() -> None:
    from importlib.util import find_spec
    from pathlib import Path

    (folder,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr]
    text = "".join(path.read_text() for path in sorted(Path(folder, "srt", "layers").rglob("*.py")))
    for name in (*REORDERING, *SHUFFLED, *PLAIN_METHODS):
        assert name in text, name


@needs_sglang
def test_a_process_of_sglangs_refuses_to_share_what_is_in_another_order() -> None:
    from hybridrl.rollout.sglang import internals as sg
    from hybridrl.rollout.sglang.process import scheduler

    model = served("qwen3_moe")
    experts(model).quant_method.w13_swiglu_interleaved = True
    host = scheduler.BesideScheduler.__new__(scheduler.BesideScheduler)
    host.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    folder = str(tiny_folder("qwen3_moe"))
    host.server_args = SimpleNamespace(
        model_path=folder, tp_size=1, ep_size=1, dtype="float32", moe_dense_tp_size=None, enable_dp_lm_head=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sg, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
        with pytest.raises(
            ValueError, match=r"experts: its parameters are in another order \(w13_swiglu_interleaved\)"
        ):
            host.hybrid_share(["nowhere"])
