"""SGLang's layout against SGLang: its own loader writes what the golden path writes, element by element."""

from typing import Any

import pytest
import torch

from tests.distributed.pool import WorkerPool
from tests.models.tiny import FAMILY_NAMES
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
DENSE = ("qwen3", "qwen2", "llama", "qwen3_tied", "qwen2_tied")
LATENT = ("deepseek_moe", "moonlight_moe")
EXPERTS = ("qwen3_moe", "mixtral", "qwen3_moe_tied", "glm4_moe", *LATENT)
LEFT_BY_LOADER = {"qwen3_moe_tied": ["lm_head.weight"]}
"""Parameters that SGLang's own loader leaves unset: its Qwen3-MoE has a head of its own even where it is tied. The
layout fills it from the embedding, and the engine then agrees with transformers."""


def _coded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in which every element is another number: exact in fp32, and none of them 0."""
    coded, start = {}, 1
    for name, tensor in tensors.items():
        coded[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        start += tensor.numel()
    assert start < 2**24, "more elements than fp32 counts exactly"
    return coded


def _compare(variant: str, **cut: Any) -> dict[str, Any]:
    tensors = _coded(support.checkpoint(variant))
    with support.opened(variant, version=None, **cut) as engine:
        parameters = engine.parameters()
        support.write(engine, tensors)
        ours = {name: tensor.clone() for name, tensor in parameters.items()}
        for tensor in parameters.values():
            tensor.zero_()
        engine._scheduler.model_runner.model.load_weights(list(tensors.items()))
        return {
            "different": [name for name, tensor in parameters.items() if not torch.equal(tensor, ours[name])],
            "parameters": len(parameters),
            "elements": sum(int((tensor != 0).sum()) for tensor in parameters.values()),
        }


@pytest.mark.parametrize("variant", [*DENSE, *EXPERTS])
def test_the_loader_agrees_with_the_layout(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    (whole,) = pool.run(_compare, world=1, variant=variant)
    assert whole["different"] == LEFT_BY_LOADER.get(variant, [])
    assert whole["elements"] > 10_000


@pytest.mark.parametrize("variant", [*DENSE, *EXPERTS])
def test_the_loader_agrees_with_the_layout_of_two_ranks(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    for result in pool.run(_compare, world=2, variant=variant, tp=2):
        assert result["different"] == LEFT_BY_LOADER.get(variant, [])


@pytest.mark.parametrize("variant", EXPERTS)
def test_the_loader_agrees_with_the_layout_of_expert_parallel_ranks(pool: WorkerPool, variant: str) -> None:
    support.folder(variant)
    for result in pool.run(_compare, world=2, variant=variant, tp=2, ep=2):
        assert result["different"] == LEFT_BY_LOADER.get(variant, [])


@pytest.mark.parametrize("options", [{}, {"server_args": {"enable_dp_lm_head": True}}], ids=["", "whole head"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_moe", "glm4_moe", "qwen3_tied"])
def test_the_loader_agrees_where_attention_is_data_parallel(
    pool: WorkerPool, variant: str, options: dict[str, Any]
) -> None:
    support.folder(variant)
    cut = {"tp": 2, "dp": 2} if variant in DENSE else {"tp": 2, "dp": 2, "ep": 2}
    for result in pool.run(_compare, world=2, variant=variant, **cut, **options):
        assert result["different"] == LEFT_BY_LOADER.get(variant, [])


@pytest.mark.full
@pytest.mark.parametrize("variant", [*FAMILY_NAMES, "qwen3_moe_tied", "glm4_moe", *LATENT])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_loader_agrees_where_key_heads_are_replicated(pool: WorkerPool, variant: str, ep: int) -> None:
    if ep > 1 and variant not in EXPERTS:
        pytest.skip("no experts")
    support.folder(variant)
    for result in pool.run(_compare, world=4, variant=variant, tp=4, ep=ep):
        assert result["different"] == LEFT_BY_LOADER.get(variant, [])
