"""The dry run's KV cache against the pool that SGLang makes."""

from typing import Any

import pytest

from hybridrl.models.families import load_spec
from hybridrl.models.weights import ITEM_BYTES
from hybridrl.rollout.sglang.options import kv_token_bytes
from tests.distributed.pool import WorkerPool
from tests.rollout.sglang import support
from tests.rollout.sglang.support import needs_sglang

pytestmark = needs_sglang
TOKENS = 8192


def _cache_bytes(variant: str, **cut: Any) -> int:
    with support.opened(variant, kv_tokens=TOKENS, **cut) as engine:
        return engine.cache_bytes


@pytest.mark.parametrize(
    ("variant", "world", "cut"),
    [
        ("qwen3_moe", 1, {}),
        ("qwen3_moe", 2, {"tp": 2}),
        ("qwen3_moe", 2, {"tp": 2, "dp": 2}),
        ("deepseek_moe", 2, {"tp": 2}),
        ("deepseek_moe", 2, {"tp": 2, "dp": 2}),
    ],
)
def test_the_cache_takes_the_bytes_that_were_planned(
    pool: WorkerPool, variant: str, world: int, cut: dict[str, int]
) -> None:
    spec = load_spec(support.folder(variant))
    each = kv_token_bytes(spec, cut.get("tp", 1) // cut.get("dp", 1), ITEM_BYTES[spec.dtype])
    for found in pool.run(_cache_bytes, world=world, variant=variant, **cut):
        assert TOKENS * each == pytest.approx(found, rel=0.02)
