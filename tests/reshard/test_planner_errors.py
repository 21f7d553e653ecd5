"""What must not be planned, and is refused with every tensor named."""

import pytest

from hybridrl.models.weights import Box, Param, Role, Tensor, WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.schedule import BucketError
from hybridrl.reshard.survey import PlanError
from tests.reshard.models import weights
from tests.reshard.random_layouts import SPEC, ListedLayout

A, B = Tensor("a", (4, 2), "bfloat16", Role.Q, 0), Tensor("b", (6,), "bfloat16", Role.K, 0)


def layout(*tensors: Tensor) -> ListedLayout:
    """Whole tensors on ranks 0 and 1."""
    made = ListedLayout(WeightMap(SPEC, tensors), (0, 1))
    for tensor in tensors:
        made.add(
            tensor.name, tensor.box, Param(tensor.name, tensor.shape, "bfloat16"), (0,) * len(tensor.shape), (0, 1)
        )
    return made


def test_an_unknown_tensor_is_named_on_either_side() -> None:
    with pytest.raises(PlanError, match="b is wanted by the destination and unknown to the source"):
        Planner(layout(A), layout(A, B))
    with pytest.raises(PlanError, match="b is held by the source and unknown to the destination"):
        Planner(layout(A, B), layout(A))


def test_a_tensor_of_another_shape_is_named_with_both() -> None:
    other = Tensor("a", (2, 4), "bfloat16", Role.Q, 0)
    with pytest.raises(PlanError, match=r"a has shape \[4, 2\] in the source and \[2, 4\] in the destination"):
        Planner(layout(A), layout(other))


def test_a_box_without_a_source_is_named_with_its_rank() -> None:
    source = ListedLayout(WeightMap(SPEC, [A]), (0, 1))
    source.add("a", Box((0, 0), (3, 2)), Param("a", (3, 2), "bfloat16"), (0, 0), (1,))
    with pytest.raises(PlanError, match=r"a has no source for 2 elements of \[0:4, 0:2\], which rank 0 needs"):
        Planner(source, layout(A))


def test_a_tensor_that_the_destination_would_not_store_is_not_left_behind_silently() -> None:
    destination = layout(A, B)
    del destination.listed["b"]
    with pytest.raises(PlanError, match="b is held by the source and has no place in the destination"):
        Planner(layout(A, B), destination)


def test_sources_that_overlap_unequally_are_refused() -> None:
    source = ListedLayout(WeightMap(SPEC, [A]), (0, 1))
    source.add("a", Box((0, 0), (3, 2)), Param("p", (3, 2), "bfloat16"), (0, 0), (0,))
    source.add("a", Box((2, 0), (4, 2)), Param("p", (3, 2), "bfloat16"), (0, 0), (1,))
    with pytest.raises(
        PlanError, match=r"a has two sources in p that overlap unequally: \[0:3, 0:2\] and \[2:4, 0:2\]"
    ):
        Planner(source, layout(A))


def test_two_pieces_at_one_place_of_the_destination_are_refused() -> None:
    destination = layout(A, B)
    param = Param("shared", (10,), "bfloat16")
    destination.listed["b"] = []
    destination.add("b", B.box, param, (0,), (0, 1))
    c = Tensor("c", (6,), "bfloat16", Role.V, 0)
    destination.weights = WeightMap(SPEC, [A, B, c])
    destination.add("c", c.box, param, (5,), (0, 1))
    planner = Planner(layout(A, B, c), destination)
    with pytest.raises(PlanError, match=r"b and c: both lie in shared of rank 0, at \[0:6\] and \[5:11\]|outside its"):
        planner.plan(0)


def test_a_piece_outside_its_parameter_is_refused() -> None:
    destination = layout(A)
    destination.shapes["a"] = Param("a", (3, 2), "bfloat16")
    with pytest.raises(PlanError, match=r"a lies at \[0:4, 0:2\] of a, outside its shape \[3, 2\]"):
        Planner(layout(A), destination).plan(1)


def test_all_problems_are_told_at_once() -> None:
    c = Tensor("c", (3,), "bfloat16", Role.V, 0)
    with pytest.raises(PlanError) as caught:
        Planner(layout(A, B), layout(A, c))
    assert len(caught.value.problems) == 2


def test_a_bucket_without_room_for_an_element_of_each_peer_is_refused_with_the_least() -> None:
    tensors = weights("qwen3_moe")
    source, destination = (
        MegatronLayout(tensors, ParallelSizes(world=4, tp=4)),
        SGLangLayout(tensors, RolloutSizes(world=4)),
    )
    with pytest.raises(BucketError, match="bucket_bytes=8 holds no element for each of 3 peers: give 16"):
        Planner(source, destination, bucket_bytes=8)
    Planner(source, destination, bucket_bytes=16)
    with pytest.raises(ValueError, match="bucket_bytes=0 must be at least 1"):
        Planner(source, destination, bucket_bytes=0)


def test_prediction_layers_are_omitted_by_choice_only() -> None:
    tensors = weights("deepseek_v3", num_nextn_predict_layers=1)
    source = SGLangLayout(tensors, RolloutSizes(world=2), mtp=True)
    without = SGLangLayout(tensors, RolloutSizes(world=2, tp=2))
    assert any("layers.4." in name for name in without.omitted)
    Planner(source, without)
    with pytest.raises(PlanError, match=r"model\.layers\.4\.enorm\.weight has no source"):
        Planner(without, source)
