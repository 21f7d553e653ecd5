"""A checkpoint of any layout and optimizer reads into any other, and into its own bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import save_runs
from tests.distributed.pool import WorkerError, WorkerPool
from tests.models.tiny import tiny_folder

Place = tuple[int, dict[str, Any]]


def place(
    world: int, layout: str = "engine", *, distributed: bool = True, dtype: str = "float32", **sizes: int
) -> Place:
    model = {"parameter_layout": layout, "vocab_multiple": 8, "dtype": dtype}
    return world, {"parallel": sizes, "model": model, "optimizer": {"distributed": distributed, "lr": 1e-3}}


def told(pool: WorkerPool, tmp_path: Path, model: str, saved: Place, loaded: Place, **how: Any) -> tuple[Any, Any]:
    folder, out = tiny_folder(model), tmp_path / "checkpoints"
    steps = {"steps": how.pop("steps")} if "steps" in how else {}
    asynchronous = how.pop("asynchronous", True)
    ours = pool.run(save_runs.save, saved[0], folder=folder, out=out, asynchronous=asynchronous, **steps, **saved[1])
    theirs = pool.run(save_runs.load, loaded[0], folder=folder, saved=out, **how, **loaded[1])
    return ours[0], theirs[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


SAME = [
    ("qwen3_moe", place(2, ep=2), True),
    ("qwen3_moe", place(2, "megatron", tp=2, ep=2, distributed=False, dtype="bfloat16"), False),
    pytest.param("qwen3_moe", place(2, dtype="bfloat16"), True, marks=pytest.mark.full),
    pytest.param("llama_biased", place(4, tp=4), True, marks=pytest.mark.full),
    pytest.param("qwen3_moe_mixed", place(4, pp=2, ep=2, distributed=False), True, marks=pytest.mark.full),
    pytest.param("mixtral", place(4, tp=2, etp=2), False, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("model", "where", "asynchronous"), SAME)
def test_the_same_layout_goes_on_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, model: str, where: Place, asynchronous: bool
) -> None:
    expected, found = told(pool, tmp_path, model, where, where, asynchronous=asynchronous)
    same(found["weights"], expected["weights"])
    assert found["metrics"] == expected["metrics"]
    same(found["after"], expected["after"])
    assert found["states"][0] == {"counter": {"value": 7}}
    assert [own["rank"] for own in found["states"][1]] == list(range(where[0]))


OTHER = [
    ("qwen3_moe", place(2, tp=2, ep=2), place(1, "megatron", distributed=False)),
    ("qwen3_moe", place(1, distributed=False), place(4, tp=2, ep=2, etp=2, pp=1)),
    ("llama_biased", place(4, tp=4), place(2, "megatron")),
    pytest.param("qwen3_moe", place(2, tp=2, ep=2), place(2, pp=2), marks=pytest.mark.full),
    pytest.param("qwen3_moe_mixed", place(4, pp=2, ep=2), place(2, "megatron", ep=2), marks=pytest.mark.full),
    pytest.param("mixtral", place(4, "megatron", tp=2, ep=2, etp=2), place(4, tp=4, etp=4), marks=pytest.mark.full),
    pytest.param("qwen2", place(2, tp=2, dtype="bfloat16"), place(4, pp=2, dtype="bfloat16"), marks=pytest.mark.full),
    pytest.param("qwen3_moe", place(4), place(2, tp=2, etp=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("model", "saved", "loaded"), OTHER)
def test_another_layout_goes_on_alike(
    pool: WorkerPool, tmp_path: Path, model: str, saved: Place, loaded: Place
) -> None:
    expected, found = told(pool, tmp_path, model, saved, loaded)
    same(found["weights"], expected["weights"])
    coarser = 1000 if saved[1]["model"]["dtype"] == "bfloat16" else 1  # another order of its sums rounds otherwise
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], abs=1e-5 * coarser)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4 * coarser)


def test_weights_alone_start_a_new_run(pool: WorkerPool, tmp_path: Path) -> None:
    where = place(2, ep=2, dtype="bfloat16")
    expected, found = told(pool, tmp_path, "qwen3_moe", where, where, moments=False)
    same(found["weights"], expected["weights"])
    assert found["metrics"][0]["loss/total"] == expected["metrics"][0]["loss/total"]
    assert found["metrics"][0]["lr"] == found["metrics"][1]["lr"]
    assert found["metrics"][1] != expected["metrics"][1]  # its moments are new


def test_an_optimizer_that_made_no_step_has_nothing_to_save(pool: WorkerPool, tmp_path: Path) -> None:
    where = place(2, ep=2)
    expected, found = told(pool, tmp_path, "qwen3_moe", where, where, steps=0)
    assert found["metrics"] == expected["metrics"]


@pytest.mark.full
@pytest.mark.parametrize(("saved", "loaded"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_masters_are_not_lost_or_made_up_by_another_dtype(
    pool: WorkerPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    places = place(2, ep=2, dtype=saved), place(2, ep=2, dtype=loaded)
    with pytest.raises(WorkerError, match="of the saved run"):
        told(pool, tmp_path, "qwen3_moe", *places)
    expected, found = told(pool, tmp_path / "weights", "qwen3_moe", *places, moments=False)
    ours, theirs = ({n: w.to(torch.bfloat16) for n, w in one["weights"].items()} for one in (found, expected))
    same(ours, theirs)
