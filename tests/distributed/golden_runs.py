"""What the ranks of the golden path's tests run, over bare tensors: no model is built."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.models.families import weight_map
from hybridrl.models.weights import Role, Tensor, WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden import box_slices, gather, golden_sync
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from tests.reshard.simulated import SPECS, scatter_rank, whole_tensors


def empty(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Parameters full of NaN, so that whatever is not written is seen."""
    params = layout.params(rank) if rank in layout.ranks else {}
    return {n: torch.full(p.shape, float("nan"), dtype=getattr(torch, p.dtype)) for n, p in params.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, NaN payloads and the sign of zero included."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def make(spec: str, layout: Mapping[str, Any]) -> Layout:
    """A layout of a specification over this world: Megatron's sizes and options, or `ranks` of an embedded engine."""
    weights, options = weight_map(SPECS[spec]), dict(layout)
    if "ranks" in options:
        return TransformersLayout(weights, **options)
    sizes = {k: options.pop(k) for k in ("tp", "pp", "ep", "etp") if k in options}
    world = dist.get_world_size()
    return MegatronLayout(weights, ParallelSizes(world=world, **sizes), **{"vocab_multiple": 8, **options})


def sync_pairs(spec: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], bucket_bytes: int) -> None:
    """Three synchronisations of each pair, each with other values, into the same destination."""
    rank = dist.get_rank()
    for one, other in pairs:
        source, destination = make(spec, one), make(spec, other)
        params = empty(destination, rank)
        for turn in range(3):
            tensors = {name: value + turn / 4 for name, value in whole_tensors(source.weights).items()}
            ours = scatter_rank(source, tensors, rank)
            golden_sync(source, ours, destination, params, rank, bucket_bytes=bucket_bytes)
            expected = scatter_rank(destination, tensors, rank)
            assert params.keys() == expected.keys()
            assert all(same_bits(params[name], expected[name]) for name in params), (one, other, turn)


def sync_special_values() -> None:
    """-0.0, subnormals and NaNs with payloads, in bfloat16."""
    rank, patterns = dist.get_rank(), torch.tensor([-32768, 0x7F81, 0x7FC1, -64, 1, -128], dtype=torch.int16)
    source = make("moe", {"tp": 2, "ep": 2, "dtype": "bfloat16"})
    destination = make("moe", {"pp": 2, "dtype": "bfloat16"})
    whole = {
        t.name: patterns.repeat(t.size // 6 + 1)[: t.size].view(torch.bfloat16).view(t.shape) for t in source.weights
    }
    ours, params = empty(source, rank), empty(destination, rank)
    for layout, side in ((source, ours), (destination, expected := empty(destination, rank))):
        for param in side.values():
            param.zero_()
        for piece in layout.pieces(rank):
            side[piece.param][piece.slices] = whole[piece.tensor][box_slices(piece.box)].view(piece.extent)
    golden_sync(source, ours, destination, params, rank)
    assert all(same_bits(params[name], expected[name]) for name in params)


def sync_other_dtype() -> None:
    """Refused unless asked for, then rounded as torch rounds."""
    rank = dist.get_rank()
    source, destination = make("mixtral", {"ep": 2}), make("mixtral", {"tp": 2, "dtype": "bfloat16"})
    tensors = {name: value / 3 for name, value in whole_tensors(source.weights).items()}
    ours, params = scatter_rank(source, tensors, rank), empty(destination, rank)
    refused(source, ours, destination, params, "is float32 in the source and bfloat16 in the destination")
    golden_sync(source, ours, destination, params, rank, convert=True)
    expected = {name: value.bfloat16() for name, value in scatter_rank(destination, tensors, rank).items()}
    assert all(same_bits(params[name], expected[name]) for name in params)


def refused(source: Layout, ours: Any, destination: Layout, params: Any, *words: str) -> None:
    """Every rank refuses with these words, and nothing has been written."""
    before = {name: param.clone() for name, param in params.items()}
    with pytest.raises(WeightError) as caught:
        golden_sync(source, ours, destination, params, dist.get_rank())
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(same_bits(params[name], before[name]) for name in params)


def sync_refusals() -> None:
    """A mistake of one rank is told by all, before anything is sent."""
    rank = dist.get_rank()
    source, destination = make("moe", {"tp": 2, "etp": 2}), make("moe", {"ep": 2})
    ours, params = scatter_rank(source, whole_tensors(source.weights), rank), empty(destination, rank)
    wrong = dict(ours)
    if rank == 1:
        wrong["decoder.layers.0.self_attention.linear_qgkv.weight"] = wrong.pop(
            "decoder.layers.0.self_attention.linear_qkv.weight"
        )
        wrong["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"] = torch.zeros(16, 16)
    refused(
        source,
        wrong,
        destination,
        params,
        "rank 1: parameter decoder.layers.0.self_attention.linear_qkv.weight is missing",
        "rank 1: parameter decoder.layers.0.self_attention.linear_qgkv.weight is unknown to the layout",
        "local_experts.1.linear_fc1.weight has shape [16, 16], the layout expects [8, 16]",
    )
    half = {name: value[:1] if rank == 0 and "final_layernorm" in name else value for name, value in params.items()}
    refused(source, ours, destination, half, "rank 0: parameter decoder.final_layernorm.weight has shape [1]")
    other = make("dense", {})
    refused(
        source,
        ours,
        other,
        empty(other, rank),
        "model.layers.1.mlp.experts.0.up_proj.weight is in the source only",
        "model.layers.1.mlp.up_proj.weight is in the destination only",
    )
    refused(source, ours, source, ours, "shares storage with")
    golden_sync(source, ours, destination, params, rank)  # the world is still in step


def gather_with_buckets(limits: Sequence[int]) -> None:
    """The same tensors whatever the bucket; at most a bucket (or a row) and a tensor are held."""
    rank = dist.get_rank()
    source = make("tied moe", {"tp": 2, "ep": 2})
    tensors = whole_tensors(source.weights)
    ours = scatter_rank(source, tensors, rank)
    names = [t.name for t in source.weights]
    row = max(t.nbytes // t.shape[0] for t in source.weights)
    largest = max(t.nbytes for t in source.weights)
    for limit in limits:
        for to in (None, 1):
            live = _Live()
            with live:
                found = []
                for tensor, value in gather(source, ours, rank, bucket_bytes=limit, to=to):
                    assert same_bits(value, tensors[tensor.name])
                    found.append(tensor.name)
                    del value
            assert found == (names if to in (None, rank) else [])
            assert live.tensors <= largest
            assert live.buffer <= max(limit, row + 8)
    some = [names[5], names[0]]
    assert [t.name for t, _ in gather(source, ours, rank, some)] == some
    with pytest.raises(WeightError, match=r"rank 1: tensor lm_head.weight is unknown"):
        gather(source, ours, rank, ["lm_head.weight"] if rank else names)


class _Live:
    """Watches what the golden path makes: its largest buffer, and how many bytes of whole tensors it holds at most.

    Buffers are not added up: gloo's threads may let go of one a moment after its exchange.
    """

    def __enter__(self) -> None:
        self.tensors = self.buffer = self._now = 0
        self._real = torch.empty

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            value = self._real(*args, **kwargs)
            if value.dtype == torch.uint8:
                self.buffer = max(self.buffer, value.nbytes)
            else:
                self._now += value.nbytes
                self.tensors = max(self.tensors, self._now)
                weakref.finalize(value, self._gone, value.nbytes)
            return value

        torch.empty = counted  # type: ignore[assignment]

    def _gone(self, nbytes: int) -> None:
        self._now -= nbytes

    def __exit__(self, *error: object) -> None:
        torch.empty = self._real


def sync_router_bias() -> None:
    """A buffer of every MoE layer arrives like any parameter, in float32."""
    rank, spec = dist.get_rank(), SPECS["mixtral"]
    assert spec.moe is not None
    biased = replace(spec, moe=replace(spec.moe, correction_bias=True), dtypes={Role.ROUTER_BIAS: "float32"})
    bias = [Tensor(f"model.layers.{i}.bias", (4,), "float32", Role.ROUTER_BIAS, layer=i) for i in range(4)]
    weights, world = WeightMap(biased, [*weight_map(spec), *bias]), dist.get_world_size()
    source = MegatronLayout(weights, ParallelSizes(world=world, ep=2), dtype="float32")
    destination = MegatronLayout(weights, ParallelSizes(world=world, pp=2))
    tensors = whole_tensors(weights)
    for layer, tensor in enumerate(bias):
        tensors[tensor.name] = torch.tensor([layer + 0.01 * expert for expert in range(4)])
    params = empty(destination, rank)
    golden_sync(source, scatter_rank(source, tensors, rank), destination, params, rank)
    for local in range(2):
        layer = 2 * rank + local
        expected = torch.tensor([layer + 0.01 * expert for expert in range(4)])
        assert same_bits(params[f"decoder.layers.{local}.mlp.router.expert_bias"], expected)
