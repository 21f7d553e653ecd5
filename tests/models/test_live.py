"""Tensors by name, as their modules hold them now."""

import pytest
import torch

from hybridrl.models.live import LiveTensors, live_tensors, slot


def module() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return torch.nn.ModuleDict({"inner": made})


def test_names_lead_to_parameters_and_buffers_in_their_order() -> None:
    root = module()
    names = ["inner.1.running_mean", "inner.0.weight"]
    live = live_tensors(root, names)
    assert list(live) == names
    assert len(live) == 2
    assert live["inner.0.weight"] is root.get_parameter("inner.0.weight")
    assert [*live.values()] == [live[name] for name in names]
    assert dict(live).keys() == set(names)


def test_what_takes_a_tensors_place_is_seen_and_nothing_is_where_it_was_removed() -> None:
    root = module()
    live = live_tensors(root, ["inner.0.weight", "inner.0.bias"])
    other = torch.nn.Parameter(torch.ones(3, 2))
    root.get_submodule("inner.0").weight = other  # type: ignore[assignment]
    assert live["inner.0.weight"] is other
    del root.get_submodule("inner.0").bias
    assert live["inner.0.bias"].numel() == 0
    assert [tensor.numel() for tensor in live.values()] == [6, 0]


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="Linear has no parameter or buffer scale"):
        live_tensors(module(), ["inner.0.scale"])
    with pytest.raises(KeyError):
        slot(torch.nn.Linear(2, 2, bias=False), "bias")
    with pytest.raises(KeyError):
        LiveTensors({})["any"]
