"""What a freshly built model looks like: zero weights, marks that Megatron's optimizer reads, names."""

from typing import Any

import torch

from hybridrl.models.megatron.build import build_model, named_tensors, unwrap
from tests.distributed import megatron_runs
from tests.distributed.pool import WorkerPool
from tests.models.megatron.test_config import SPEC


def describe(parallel: dict[str, Any]) -> dict[str, Any]:
    config = megatron_runs.make_config(parallel)
    megatron_runs.make_groups(config)
    chunks = build_model(SPEC, config)
    tensors = named_tensors(chunks)
    return {
        "nonzero": [name for name, t in tensors.items() if "norm" not in name and bool(t.ne(0).any())],
        "unmarked": [name for name, t in tensors.items() if not getattr(t, "tensor_model_parallel", False)],
        "embedding": tuple(tensors["embedding.word_embeddings.weight"].shape),
        "expert_reduce": {t.allreduce for name, t in tensors.items() if ".experts." in name},  # type: ignore[attr-defined]
        "all": len(tensors),
    }


def test_weights_start_at_zero_and_sharded_ones_are_marked(pool: WorkerPool) -> None:
    for rank in pool.run(describe, 2, parallel={"tp": 2, "ep": 2}):
        assert rank["nonzero"] == []
        assert all("norm" in name or "router" in name for name in rank["unmarked"])
        assert len(rank["unmarked"]) == 4 * 4 + 3 + 1
        assert rank["embedding"] == (32, 32)  # 50 rows padded to 64
        assert rank["expert_reduce"] == {False}


def buffers_by_name() -> list[str]:
    config = megatron_runs.make_config({})
    megatron_runs.make_groups(config)
    chunks = build_model(SPEC, config)
    before = set(named_tensors(chunks))
    router = unwrap(chunks[0]).decoder.layers[0].mlp.router
    del router.expert_bias  # None without a correction bias
    router.register_buffer("expert_bias", torch.zeros(8))
    router.register_buffer("scratch", torch.zeros(8), persistent=False)
    return sorted(set(named_tensors(chunks)) - before)


def test_persistent_buffers_are_weights_and_scratch_is_not(pool: WorkerPool) -> None:
    assert pool.run(buffers_by_name, 1) == [["decoder.layers.0.mlp.router.expert_bias"]]
