"""The experts that tokens were routed to: how they are packed, and those of the embedded engine."""

from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.models.families import load_spec
from hybridrl.models.spec import MoeSpec
from hybridrl.rollout.route_recorder import RouteRecorder
from hybridrl.rollout.routes import NO_EXPERT, dtype_for, pack
from hybridrl.rollout.samples import Sample
from tests.models.tiny import tiny_folder
from tests.rollout.common import loaded_engine, prompt, reference_model, requests


def moe(num_experts: int = 8, layers: tuple[bool, ...] = (False, True, True)) -> MoeSpec:
    return MoeSpec(num_experts=num_experts, top_k=2, ffn_size=4, norm_topk_prob=True, layers=layers)


@pytest.mark.parametrize(("experts", "dtype"), [(2, np.int8), (128, np.int8), (129, np.int16), (512, np.int16)])
def test_ids_take_the_narrowest_type_that_holds_the_last_expert(experts: int, dtype: type) -> None:
    assert dtype_for(experts) == dtype
    last = np.full((1, 3, 2), experts - 1)
    assert pack([last], moe(experts))[0, 1:].tolist() == [[experts - 1] * 2] * 2


def test_parts_are_joined_and_dense_layers_hold_no_expert() -> None:
    parts = [np.arange(12, dtype=np.int32).reshape(2, 3, 2) % 8, np.ones((1, 3, 2), np.int64)]
    packed = pack(parts, moe())
    assert packed.tolist() == [[[-1, -1], [2, 3], [4, 5]], [[-1, -1], [0, 1], [2, 3]], [[-1, -1], [1, 1], [1, 1]]]
    assert NO_EXPERT == -1


def test_no_parts_have_no_rows() -> None:
    assert pack([], moe()).shape == (0, 3, 2)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_id_of_no_expert_is_refused_by_place(wrong: int) -> None:
    ids = np.zeros((3, 3, 2), np.int16)
    ids[1, 2, 1] = wrong
    with pytest.raises(ValueError, match=rf"token 1 .* layer 2: routed to expert {wrong}; expected 0 to 7"):
        pack([ids], moe())


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 2\).*expected layers and top-k \(3, 2\)"):
        pack([np.zeros((1, 4, 2), np.int8)], moe())


def test_a_module_with_other_moe_layers_is_refused() -> None:
    layers = [torch.nn.ModuleDict({"experts": torch.nn.Identity()}), torch.nn.ModuleDict({"mlp": torch.nn.Identity()})]
    with pytest.raises(ValueError, match=r"\[True, False\].*\(False, True\)"):
        RouteRecorder(layers, moe(layers=(False, True)))


def chosen_by_whole_passes(variant: str, sample: Sample, **changes: Any) -> torch.Tensor:
    """[tokens, MoE layers, top-k], ascending: one pass over everything but the last token, by the router's logits."""
    model = reference_model(variant, **changes)
    ids = [*sample.prompt.token_ids, *sample.response_ids][:-1]
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
    return torch.stack([logits.topk(2).indices.sort(-1).values for logits in found], 1)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_mixed", "mixtral"])
def test_the_embedded_engine_returns_what_the_router_chose(variant: str) -> None:
    engine = loaded_engine(variant, max_batch_size=4, routed_experts=True)
    layers = np.flatnonzero(load_spec(tiny_folder(variant)).moe.layers)  # type: ignore[union-attr]
    for round_ in range(2):
        samples = engine.generate(requests([prompt(i) for i in range(3 + round_)], n=2, stop_token_ids=(7, 11)))
        for sample in samples:
            routes = sample.routed_experts
            assert routes is not None
            assert routes.dtype == np.int8
            assert len(routes) == len(sample.prompt.token_ids) + len(sample.response_ids) - 1
            found = torch.from_numpy(routes[:, layers]).long().sort(-1).values
            assert torch.equal(found, chosen_by_whole_passes(variant, sample))
            dense = np.delete(routes, layers, axis=1)
            assert (dense == NO_EXPERT).all()


def test_routes_come_only_where_they_are_asked_for_and_exist() -> None:
    asked = [*requests([prompt(1)]), *requests([prompt(2)], max_new_tokens=0)]
    drawn, empty = loaded_engine(routed_experts=True).generate(asked)
    assert drawn.routed_experts is not None
    assert empty.routed_experts is None
    assert loaded_engine().generate(asked)[0].routed_experts is None
    assert loaded_engine("qwen3", routed_experts=True).generate(asked)[0].routed_experts is None
