"""Layers of pipeline stages: Megatron's own division, and never a layer lost."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.parallel.stages import stage_layers


def offsets(*args: Any, **kwargs: Any) -> list[Any]:
    return [[chunk[0] for chunk in stage] for stage in stage_layers(*args, **kwargs)]


def test_layers_of_interleaved_and_uneven_stages() -> None:
    assert offsets(14, 4, vpp=2, last=2) == [[0, 7], [2, 9], [4, 11], [6, 13]]
    assert offsets(8, 2, vpp=2) == [[0, 4], [2, 6]]
    assert offsets(11, 3, first=3) == [[0], [3], [7]]
    assert offsets(11, 3, last=3) == [[0], [4], [8]]
    assert offsets(7, 3, first=2, last=1) == [[0], [2], [6]]
    assert stage_layers(3, 2, first=1, last=2) == [[[0]], [[1, 2]]]
    assert stage_layers(5, 1) == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_layers": 30, "pp": 4}, ("30", "4 stages")),
        ({"num_layers": 8, "pp": 2, "first": 3, "last": 4}, ("1 layers", "nowhere")),
        ({"num_layers": 8, "pp": 3, "first": 4, "last": 4}, ("0 layers",)),
        ({"num_layers": 8, "pp": 2, "first": 9}, ("first_stage_layers=9",)),
        ({"num_layers": 6, "pp": 2, "vpp": 2}, ("3 layers", "vpp=2")),
        ({"num_layers": 8, "pp": 1, "vpp": 2}, ("vpp=2", "pp=1")),
        ({"num_layers": 8, "pp": 1, "first": 8}, ("first_stage_layers=8", "pp=1")),
        ({"num_layers": 8, "pp": 0, "vpp": 0, "last": 0}, ("pp=0", "vpp=0", "last_stage_layers=0")),
    ],
)
def test_divisions_that_lose_layers_are_refused(arguments: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        stage_layers(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_every_layer_is_built_once_or_the_division_is_refused() -> None:
    some = (None, 1, 2, 3)
    for num_layers, pp, vpp, first, last in product(range(1, 17), range(1, 6), (1, 2, 3), some, some):
        try:
            stages = stage_layers(num_layers, pp, vpp, first, last)
        except ValueError:
            continue
        assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(num_layers))
        assert all(len(stage) == vpp and all(stage) for stage in stages)


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [
        (14, 4, 2, None, 2),
        (14, 4, 2, 2, None),
        (12, 3, 2, 4, 4),
        (11, 3, 1, 3, None),
        (11, 3, 1, None, 3),
        (8, 4, 1, None, None),
        (8, 2, 2, None, None),
        (7, 3, 1, 2, 1),
        (3, 2, 1, 1, 2),
    ],
)
def test_division_is_megatrons(num_layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for rank, chunks in enumerate(stage_layers(num_layers, pp, vpp, first, last)):
        for chunk, layers in enumerate(chunks):
            assert layer.get_transformer_layer_offset(config, chunk, rank) == layers[0]
            assert block.get_num_layers_to_build(config, chunk, rank) == len(layers)
