"""The executor on one rank: conversion, strides, aliases, storage; and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrl.models.families import weight_map
from hybridrl.models.weights import Param
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.agreement import SyncError
from hybridrl.reshard.checksum import Checker, ChecksumError
from hybridrl.reshard.golden import gather, golden_sync
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.proof import coverage_problems
from hybridrl.reshard.storages import Storages, overlap_problems
from hybridrl.reshard.sync import WeightSync
from hybridrl.reshard.transports import Exchange, NoTransport, TransportError
from tests.reshard.simulated import MOE, SPECS

WEIGHTS = weight_map(MOE)


def trained(dtype: str = "float32", spec: str = "moe") -> MegatronLayout:
    return MegatronLayout(weight_map(SPECS[spec]), ParallelSizes(world=1), vocab_multiple=64, dtype=dtype)


def served(dtype: str = "float32", spec: str = "moe") -> TransformersLayout:
    return TransformersLayout(weight_map(SPECS[spec]), (0,), dtype=dtype)


def tensors(layout: Any, seed: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed or 0)
    found = {}
    for name, param in layout.params(0).items():
        dtype = getattr(torch, param.dtype)
        found[name] = torch.full(param.shape, float("nan"), dtype=dtype)
        if seed is not None:
            found[name].copy_(torch.randn(param.shape, generator=generator))
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, value in a.items():
        assert torch.equal(value.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(("have", "want"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_dtypes_are_converted_as_on_the_golden_path(have, want):
    source, destination = trained(have), served(want)
    ours, fast, slow = tensors(source, 1), tensors(destination), tensors(destination)
    special = torch.tensor([-0.0, float("inf"), 1e-40, 1.00390625, 1.01171875])  # the last two lie half-way in bfloat16
    for value in ours.values():
        value.view(-1)[:5] = special[: value.numel()]
    sync = WeightSync(source, ours, destination, fast, 0, verify=True)
    for version in range(2):
        sync.run(version)
        golden_sync(source, ours, destination, slow, 0, convert=True)
        assert_same(fast, slow)


@pytest.mark.parametrize("bucket_bytes", [2**20, 2**10])
def test_rows_are_gathered_before_they_are_converted_where_staging_has_room(bucket_bytes):
    source, destination = trained(), served("bfloat16")
    ours, fast, slow = tensors(source, 9), tensors(destination), tensors(destination)
    wide = {name: torch.zeros(*value.shape[:-1], 2 * value.shape[-1]) for name, value in ours.items()}
    ours = {name: wide[name][..., : value.shape[-1]].copy_(value) for name, value in ours.items()}
    sync = WeightSync(source, ours, destination, fast, 0, bucket_bytes=bucket_bytes)
    for version in range(2):
        sync.run(version)
        golden_sync(source, ours, destination, slow, 0, convert=True)
        assert_same(fast, slow)
    scratch = sync.executor.staging.scratch
    assert 0 < scratch.numel() == sync.executor.staging.nbytes <= 2 * bucket_bytes
    assert any(buffer is scratch for buffer in sync.executor.staging.tensors())  # the ledger counts it too
    gathers = [
        b
        for b in sync.executor._program.copies
        if b.writes[0].untyped_storage()._cdata == scratch.untyped_storage()._cdata
    ]
    assert len(gathers) > (bucket_bytes == 2**10)
    direct = [
        b
        for b in sync.executor._program.copies
        if b.reads[0].dtype != b.writes[0].dtype and not b.reads[0].is_contiguous()
    ]
    assert bool(direct) == (bucket_bytes == 2**10)


def test_parameters_may_be_stored_transposed_or_within_a_larger_buffer():
    source, destination = trained(), served()
    ours, fast, slow = tensors(source, 2), tensors(destination), tensors(destination)
    flat = torch.zeros(sum(value.numel() for value in ours.values()) + 3)
    start = 3
    for name, value in ours.items():
        flat[start : start + value.numel()] = value.view(-1)
        ours[name] = flat[start : start + value.numel()].view(value.shape)
        start += value.numel()
    fast = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in fast.items()}
    sync = WeightSync(source, ours, destination, fast, 0)
    assert sum(len(batch.writes) for batch in sync.executor._program.copies) < len(sync.plan.copies) * 2
    sync.run(0)
    golden_sync(source, ours, destination, slow, 0)
    assert_same(fast, slow)


def test_inference_tensors_and_parameters_with_gradients_are_written():
    source, destination = trained(), served()
    with torch.inference_mode():
        fast = tensors(destination)
    ours = {name: torch.nn.Parameter(value) for name, value in tensors(source, 3).items()}
    slow = tensors(destination)
    WeightSync(source, ours, destination, fast, 0).run(0)
    golden_sync(source, ours, destination, slow, 0)
    assert_same(fast, slow)


def test_an_alias_that_is_one_storage_is_left_alone_and_another_is_copied():
    layout = served()
    ours = tensors(layout, 4)
    shared = next(iter(ours))
    theirs = {**tensors(layout), shared: ours[shared]}
    sync = WeightSync(layout, ours, layout, theirs, 0, verify=True)
    assert len(sync.plan.aliases) == len(ours)
    sync.run(0)
    assert_same(theirs, ours)
    writes = [w.untyped_storage()._cdata for batch in sync.executor._program.copies for w in batch.writes]
    assert ours[shared].untyped_storage()._cdata not in writes
    assert len(writes) == len(ours) - 1


def test_storage_shared_otherwise_is_refused():
    source, destination = trained(), served()
    ours, theirs = tensors(source, 5), tensors(destination)
    norm = "model.norm.weight"
    theirs[norm] = ours["decoder.layers.0.input_layernorm.weight"]
    with pytest.raises(WeightError, match=r"input_layernorm.weight and destination model.norm.weight share bytes"):
        WeightSync(source, ours, destination, theirs, 0)


def test_overlaps_are_found_among_many_spans():
    flat = torch.zeros(100)
    source = {"a": flat[:10], "b": flat[10:40]}
    fine = {"x": flat[40:50], "y": flat[50:60], "same": flat[:10]}
    assert overlap_problems(source, fine, {("a", "same")}) == []
    assert len(overlap_problems(source, fine, set())) == 1
    assert len(overlap_problems(source, {"x": flat[45:55], "y": flat[50:60]}, set())) == 1
    assert len(overlap_problems(source, {"x": flat[39:41]}, set())) == 1
    assert len(overlap_problems({"a": flat[30:31]}, {"x": flat[:60], "y": flat[70:]}, set())) == 1
    # an engine's embedding and head, both of which are the trainer's only one: on the way back one of them is its alias
    tied = {"embedding": flat[:10], "head": flat[:10]}
    assert overlap_problems({"only": flat[:10]}, tied, {("only", "embedding"), ("only", "head")}) == []
    assert overlap_problems(tied, {"only": flat[:10]}, {("head", "only")}) == []
    assert len(overlap_problems(tied, {"only": flat[:9]}, {("head", "only")})) == 1


def test_storages_notice_what_moved_and_nothing_else():
    one = {"p": torch.nn.Parameter(torch.zeros(8)), "q": torch.zeros(4)}
    storages = Storages(one)
    one["p"].data.add_(1)
    assert storages.problems() == []
    kept = one["p"].data
    one["p"].data = torch.zeros(8)
    assert storages.problems() == ["p was given another storage: write into it in place, or make a new weight sync"]
    one["p"].data = kept
    assert storages.problems() == []
    one["q"].untyped_storage().resize_(0)
    assert "its storage of 16 bytes has 0 now" in storages.problems()[0]


def test_all_misfits_are_told_at_once():
    source, destination = trained(), served()
    ours, theirs = tensors(source, 6), tensors(destination)
    del ours["decoder.final_layernorm.weight"]
    theirs["model.norm.weight"] = torch.zeros(3)
    theirs["extra"] = torch.zeros(3)
    with pytest.raises(WeightError) as error:
        WeightSync(source, ours, destination, theirs, 0)
    text = str(error.value)
    assert "source parameter decoder.final_layernorm.weight is missing" in text
    assert "destination parameter model.norm.weight has shape [3], the layout expects [16]" in text
    assert "destination parameter extra is unknown to the layout" in text


def test_parameters_that_have_left_are_named_before_any_is_read():
    layout = served()
    ours, theirs = tensors(layout, 8), tensors(layout)
    for value in (ours["model.norm.weight"], theirs["model.norm.weight"]):
        value.untyped_storage().resize_(0)
    for call in (
        lambda: WeightSync(layout, ours, layout, theirs, 0),
        lambda: golden_sync(layout, ours, layout, theirs, 0),
        lambda: next(gather(layout, ours, 0)),
    ):
        with pytest.raises(WeightError, match=r"parameter model.norm.weight has no memory"):
            call()


def test_coverage_is_proven_for_each_element():
    plan = Planner(trained(), served()).plan(0)
    params = served().params(0)
    assert coverage_problems(plan, params) == []
    without = replace(plan, copies=plan.copies[1:])
    assert "elements are written" in coverage_problems(without, params)[0]
    twice = replace(plan, copies=(*plan.copies, plan.copies[0]))
    assert "is written twice" in coverage_problems(twice, params)[0]
    name = plan.copies[0].destination.param
    smaller = {**params, name: Param(name, (1, 1), "float32")}
    assert "outside of its shape [1, 1]" in coverage_problems(plan, smaller)[0]


@pytest.mark.parametrize("what", ["copy", "padding"])
def test_checksums_compare_local_copies_and_padding(what):
    source, destination = (trained(), served()) if what == "copy" else (served(), trained())
    ours, theirs = tensors(source, 7), tensors(destination)
    sync = WeightSync(source, ours, destination, theirs, 0)
    sync.run(0)
    check = Checker(sync.plan, ours, theirs)
    check()
    if what == "copy":
        theirs["model.layers.1.self_attn.q_proj.weight"][2] *= -1
        with pytest.raises(ChecksumError, match=r"q_proj.weight\[0:16, 0:16\] differs from this rank's own decoder"):
            check()
    else:
        theirs["embedding.word_embeddings.weight"][-1, -1] = 1.0
        with pytest.raises(ChecksumError, match=r"padding of embedding.word_embeddings.weight\[50:64, 0:16\]"):
            check()


def test_a_world_of_one_sends_nothing():
    none = torch.empty(0, dtype=torch.uint8)
    NoTransport().start(Exchange(none, none, [0], [0]))
    with pytest.raises(TransportError, match="start torch"):
        NoTransport().start(Exchange(torch.empty(3, dtype=torch.uint8), none, [3], [0]))


def test_a_failure_on_a_single_rank_world_is_told_alike():
    source, destination = trained(), served()
    ours, theirs = tensors(source, 8), tensors(destination)
    sync = WeightSync(source, ours, destination, theirs, 0)
    sync.run(4)
    sync.executor._program.copies[0].reads[0] = torch.zeros(2, 3, 5, 7)
    with pytest.raises(SyncError, match="weights 5 are half-written") as error:
        sync.run(5)
    assert error.value.touched
    assert error.value.__cause__ is not None
    assert sync.version is None
