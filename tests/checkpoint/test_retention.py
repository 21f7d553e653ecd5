"""Which checkpoints stay, what makes one whole, and boxes of flat ranges."""

import errno
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.files import RankWriter, with_retries
from hybridrl.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    checkpoints,
    file_problems,
    folder_of,
    read_manifest,
    write_manifest,
)
from hybridrl.checkpoint.ranges import boxes_of_range
from hybridrl.checkpoint.retention import ASIDE, kept, remove_leftovers, remove_old
from hybridrl.checkpoint.states import RandomStates, StateError, States
from hybridrl.config.schema import CheckpointConfig


def make(parent: Path, step: int, metric: float | None = None) -> Path:
    folder = folder_of(parent, step)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step=step, world=1, metric=metric))
    return folder


def test_the_newest_the_regular_and_the_best_are_kept() -> None:
    steps = {1: 0.5, 2: 0.9, 3: 0.9, 4: None, 5: 0.1, 6: 0.2}
    assert kept(steps, CheckpointConfig(keep_last=2)) == {5, 6}
    assert kept(steps, CheckpointConfig(keep_last=1, keep_every=4)) == {4, 6}
    assert kept(steps, CheckpointConfig(keep_last=1, best_metric="reward/mean")) == {3, 6}
    assert kept(steps, CheckpointConfig(keep_last=1, best_metric="loss", best_mode="min")) == {5, 6}


def test_only_whole_checkpoints_count_and_only_they_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step-00000004").mkdir()  # no manifest
    (tmp_path / "step-00000000").symlink_to(make(tmp_path / "elsewhere", 0))
    (tmp_path / f"{ASIDE}step-00000005").mkdir()
    remove_old(tmp_path, CheckpointConfig(keep_last=2))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *("step-00000000", "step-00000002", "step-00000003", "step-00000004"),
        *("elsewhere", f"{ASIDE}step-00000005"),
    }
    remove_leftovers(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-0000000{i}" for i in (0, 2, 3, 4)]


def test_any_change_of_a_file_or_the_manifest_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    writer = RankWriter(folder, 0, None, {"state.pt": b"abcdef"})
    writer.write()
    write_manifest(folder, Manifest(step=1, world=1, files=writer.files))
    files = read_manifest(folder).files
    assert file_problems(folder, files, files) == []
    for content, word in ((b"abcdeg", "SHA-256 differs"), (b"abc", "3 bytes, 6 were written")):
        (folder / "state.pt").write_bytes(content)
        assert word in file_problems(folder, files, files)[0]
    (folder / "state.pt").unlink()
    assert "No such file" in file_problems(folder, files, files)[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "step": 2}))
    with pytest.raises(CheckpointError, match="digest differs"):
        read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest)[:40])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(folder)


def test_a_full_disk_is_tried_again_and_then_told() -> None:
    tries: list[int] = []
    told: list[str] = []

    def full(times: int) -> None:
        tries.append(1)
        if len(tries) <= times:
            raise OSError(errno.ENOSPC, "No space left on device", "file")

    with_retries(lambda: full(2), 3, 0.0, told.append)
    assert (len(tries), len(told)) == (3, 2)
    tries.clear()
    with pytest.raises(OSError, match="No space left"):
        with_retries(lambda: full(9), 3, 0.0, told.append)
    assert len(tries) == 4


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    numbers = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    found = []
    for flat, box in boxes_of_range(shape, start, stop):
        part = numbers[tuple(map(slice, box.start, box.stop))].flatten()
        assert part[0] == flat
        found += part.tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes_of_range(shape, start, stop))) <= 2 * len(shape) - 1


class Counter:
    """A part of a run."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_parts_are_restored_when_they_are_added_and_none_is_lost() -> None:
    saved = States()
    saved.add("early", Counter(1))
    saved.add("late", Counter(2))
    saved.add("rank", Counter(3), per_rank=True)
    shared, own = saved.collect()
    states, early, late, rank = States(), Counter(0), Counter(0), Counter(0)
    states.add("early", early)
    states.add("rank", rank, per_rank=True)
    states.restore(shared, own)
    with pytest.raises(StateError, match="holds late, which this run does not have"):
        states.check()
    states.add("late", late)
    states.check()
    assert (early.value, late.value, rank.value) == (1, 2, 3)
    with pytest.raises(StateError, match="holds no controller, only early, late"):
        states.add("controller", Counter(0))
    with pytest.raises(ValueError, match="two parts"):
        states.add("late", late)


class Tracker:
    """Megatron's generators by name."""

    def __init__(self) -> None:
        self.states = {"expert": torch.get_rng_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def test_every_generator_goes_on_where_it_was_and_restoring_draws_nothing() -> None:
    def draws() -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.standard_normal(3), float(torch.rand(()))]

    tracker = Tracker()
    saved = States()
    saved.add("random", RandomStates(tracker), per_rank=True)
    np.random.standard_normal(1)  # half of a pair is kept
    shared, own = saved.collect()
    buffer = io.BytesIO()
    torch.save(own, buffer)
    expected = draws()
    tracker.states = {}
    draws()
    restored = States()
    restored.restore(shared, torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    restored.add("random", RandomStates(tracker), per_rank=True)
    assert torch.equal(torch.get_rng_state(), own["random"]["torch"])
    assert draws() == expected
    assert torch.equal(tracker.states["expert"], own["random"]["megatron"]["expert"])
