"""The attention for CPUs against the formula written out, values and gradients."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.models.megatron.attention import CausalAttention
from hybridrl.models.megatron.build import packed_seq_params
from hybridrl.parallel import compat

HEAD_DIM = 8


def make_attention(**changes: Any) -> CausalAttention:
    return CausalAttention(SimpleNamespace(context_parallel_size=1, **changes), layer_number=1)  # type: ignore[arg-type]


def one_sequence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[s, heads, d]`, `[s, kv_heads, d]` → `[s, heads·d]`, head by head and position by position."""
    share = query.shape[1] // key.shape[1]
    rows = []
    for i in range(len(query)):
        heads = []
        for head in range(query.shape[1]):
            scores = key[: i + 1, head // share] @ query[i, head] / math.sqrt(query.shape[-1])
            heads.append(scores.softmax(0) @ value[: i + 1, head // share])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def make_inputs(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, 4, HEAD_DIM), (tokens, kv_heads, HEAD_DIM), (tokens, kv_heads, HEAD_DIM)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def check(found: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_sequences_see_only_themselves(kv_heads: int) -> None:
    compat.install()
    lengths = [5, 1, 7, 2]
    inputs = make_inputs(sum(lengths), kv_heads)
    found = make_attention()(*inputs, None, packed_seq_params=packed_seq_params(lengths))
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    check(found, torch.cat([one_sequence(*part) for part in parts]), inputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_padding_on_the_right_is_not_seen(kv_heads: int) -> None:
    lengths = [5, 3]
    inputs = make_inputs(10, kv_heads)
    batch = [x.view(2, 5, *x.shape[1:]).transpose(0, 1) for x in inputs]  # [s, b, heads, d]
    found = make_attention()(*batch, None)
    assert found.shape == (5, 2, 4 * HEAD_DIM)
    real = torch.cat([found[:length, b] for b, length in enumerate(lengths)])
    rows = [[x[5 * b : 5 * b + length] for x in inputs] for b, length in enumerate(lengths)]
    check(real, torch.cat([one_sequence(*row) for row in rows]), inputs)


def test_bfloat16_scores_are_normalised_in_float32() -> None:
    inputs = [x.detach().bfloat16() for x in make_inputs(64, 2)]
    found = make_attention()(*(x[:, None] for x in inputs), None)[:, 0]
    expected = one_sequence(*(x.float() for x in inputs))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=2**-7, rtol=2**-7)  # the output's own rounding


def test_masks_and_wrong_bounds_are_refused() -> None:
    compat.install()
    inputs = make_inputs(6, 2)
    with pytest.raises(ValueError, match="without a mask"):
        make_attention()(*(x[:, None] for x in inputs), torch.ones(1, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="end at 5, the batch has 6 tokens"):
        make_attention()(*inputs, None, packed_seq_params=packed_seq_params([2, 3]))


def test_context_parallelism_without_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel_size=2, but no group"):
        CausalAttention(SimpleNamespace(context_parallel_size=2), layer_number=1)  # type: ignore[arg-type]
