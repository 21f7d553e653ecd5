"""Coded elements through SGLang's own loader: the layout's places are right, and another order is found and named."""

from typing import Any

import pytest
import torch

from hybridrl.models.families import load_spec, weight_map
from hybridrl.rollout.sglang import probe
from tests.distributed.pool import WorkerPool
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang


def test_codes_differ_between_tensors_and_places_and_are_exact_in_every_dtype() -> None:
    weights = weight_map(load_spec(support.folder("qwen3_moe_mixed")))
    tensors = probe.one_layer_of_each_kind(weights)
    assert {tensor.layer for tensor in tensors} == {0, 1}  # one layer with experts and one without
    found = [probe.coded(tensor, number, torch.device("cpu")) for number, tensor in enumerate(tensors)]
    for tensor, codes in zip(tensors, found, strict=True):
        assert torch.equal(codes, codes.to(torch.bfloat16).to(codes.dtype))
        assert codes.abs().max() < probe.CODES
        if tensor.size > 1000:
            assert codes.unique().numel() > 200
        if len(tensor.shape) == 2:
            assert len({tuple(row.tolist()) for row in codes}) == tensor.shape[0]
            assert not torch.equal(codes.flip(0), codes)
    square = [codes for codes in found if codes.shape == found[0].shape]
    assert len({tuple(codes.flatten().tolist()) for codes in square}) == len(square)


def _probe(variant: str, swapped: bool, **cut: Any) -> list[str]:
    with support.opened(variant, version=None, **cut) as engine:
        model = engine._scheduler.model_runner.model
        if swapped:  # as a kernel does that wants the up projection first
            method = next(m.quant_method for n, m in model.named_modules() if n.endswith("layers.0.mlp.experts"))
            process = method.process_weights_after_loading

            def swap(layer: torch.nn.Module) -> None:
                process(layer)
                layer.w13_weight.data = torch.cat(layer.w13_weight.data.chunk(2, dim=1)[::-1], dim=1)

            method.process_weights_after_loading = swap
        return probe.probe(model, engine.layout, engine.parameters(), torch.distributed.get_rank())


@needs_sglang
@pytest.mark.parametrize(
    ("variant", "world", "cut"),
    [
        ("qwen3_moe", 1, {}),
        ("mixtral", 2, {"tp": 2, "ep": 2}),
        pytest.param("qwen3_moe", 2, {"tp": 2}, marks=pytest.mark.full),
        pytest.param("qwen3_moe_tied", 2, {"tp": 2, "ep": 2}, marks=pytest.mark.full),
        pytest.param("qwen3", 2, {"tp": 2}, marks=pytest.mark.full),
        pytest.param("qwen2", 1, {}, marks=pytest.mark.full),
        pytest.param("llama", 4, {"tp": 4}, marks=pytest.mark.full),
    ],
)
def test_sglang_puts_coded_elements_where_the_layout_says(
    pool: WorkerPool, variant: str, world: int, cut: dict[str, int]
) -> None:
    support.folder(variant)
    assert pool.run(_probe, world, variant=variant, swapped=False, **cut) == [[]] * world


@needs_sglang
def test_an_order_that_nothing_tells_of_is_found(pool: WorkerPool) -> None:
    support.folder("qwen3_moe")
    ((told,),) = pool.run(_probe, 1, variant="qwen3_moe", swapped=True)
    assert told.startswith("model.layers.0.mlp.experts.w13_weight: ")
    assert "elements of model.layers.0.mlp.experts.0." in told
    assert told.endswith("lie elsewhere")
