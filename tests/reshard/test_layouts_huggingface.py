"""Whole-tensor layouts: the files' names, and the names that a transformers model has in memory."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.models.families import load_spec, weight_map
from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from tests.models.tiny import VARIANTS, tiny_folder
from tests.reshard.simulated import SPECS, check_layout, scatter


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", [HuggingFaceLayout, TransformersLayout])
def test_views_agree(kind: type[HuggingFaceLayout | TransformersLayout], name: str) -> None:
    check_layout(kind(weight_map(SPECS[name]), [0, 3, 2]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_layout_is_that_of_the_loaded_model(variant: str) -> None:
    folder = tiny_folder(variant)
    layout = TransformersLayout(weight_map(load_spec(folder)), [0])
    ours = scatter(layout, load_file(folder / "model.safetensors"))[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    real = {**dict(model.named_parameters()), **buffers}
    assert real.keys() == ours.keys()
    assert {n: tuple(p.shape) for n, p in real.items()} == {n: p.shape for n, p in layout.params(0).items()}
    assert all(torch.equal(real[name], ours[name]) for name in real)


def test_dtype_of_parameters_can_be_chosen() -> None:
    weights = weight_map(SPECS["mixtral"])
    for kind in (HuggingFaceLayout, TransformersLayout):
        assert {p.dtype for p in kind(weights, [0]).params(0).values()} == {"float32"}
        assert {p.dtype for p in kind(weights, [0], dtype="bfloat16").params(0).values()} == {"bfloat16"}


def test_rank_that_takes_no_part_is_an_error() -> None:
    for kind in (HuggingFaceLayout, TransformersLayout):
        layout = kind(weight_map(SPECS["dense"]), [0, 2])
        assert layout.holders("lm_head.weight")[0].ranks == (0, 2)
        for ask in (layout.params, layout.pieces):
            with pytest.raises(KeyError, match="rank 1"):
                ask(1)
