"""Damaged checkpoints are recognised, whatever was damaged; a save that fails leaves those that were whole."""

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder

KINDS = ("__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "common.pt", "state.pt", "manifest.json")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flip": _flip,
    "cut": _cut,
    "longer": _longer,
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


def _model(value: float) -> Any:
    """A model of two ranks in which every weight is `value`."""
    from hybridrl.checkpoint.shards import Model
    from hybridrl.models.families import load_spec, weight_map
    from hybridrl.parallel import compat
    from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout

    compat.install()
    layout = HuggingFaceLayout(weight_map(load_spec(tiny_folder("qwen2"))), [0, 1], dtype="float32")
    tensors = {p.name: torch.full(p.shape, value) for p in layout.params(0).values()}
    return Model("policy", layout, dist.get_rank(), lambda: tensors)


def _saver(parent: Path, notes: list[str], **options: Any) -> Any:
    from hybridrl.checkpoint.save import Saver
    from hybridrl.config.schema import CheckpointConfig

    config = CheckpointConfig(**{"keep_last": 2, "retries": 0, "retry_wait_s": 0.0, **options})
    return Saver(parent, config, dist.get_rank(), notes.append)


def _save(saver: Any, step: int) -> None:
    saver.start(step, [_model(float(step))], ({"step": {"value": step}}, {"rank": dist.get_rank()}), None)
    saver.wait()


def _found_after_damage(parent: Path) -> dict[str, Any]:
    """Which checkpoint is used after each damage of the newest, and what is said."""
    from hybridrl.checkpoint.load import newest_whole

    saver = _saver(parent, [])
    _save(saver, 1)
    _save(saver, 2)
    newest, found = parent / "step-00000002", {}
    files = {path.name: path.read_bytes() for path in newest.iterdir()}
    assert files.keys() == set(KINDS)
    for name in KINDS:
        for damage, act in DAMAGES.items():
            if dist.get_rank() == 0:
                act(newest / name)
            dist.barrier()
            notes: list[str] = []
            used = newest_whole(parent, notes.append)
            found[f"{damage} of {name}"] = (used and used.name, notes)
            dist.barrier()
            if dist.get_rank() == 0:
                if (newest / name).is_dir():
                    (newest / name).rmdir()
                (newest / name).write_bytes(files[name])
            dist.barrier()
    mended = newest_whole(parent, print)
    assert mended is not None
    assert mended.name == newest.name
    return found


def test_every_damage_of_every_file_is_found_and_the_one_before_used(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_folder("qwen2")
    for found in pool.run(_found_after_damage, world=2, parent=tmp_path):
        assert len(found) == len(KINDS) * len(DAMAGES)
        for damage, (used, notes) in found.items():
            name = damage.rpartition(" ")[2]
            assert used == "step-00000001", damage
            assert len(notes) == 1
            assert name in notes[0]
            assert notes[0].endswith("the one before it is used")


@contextmanager
def _largest_file(nbytes: int) -> Iterator[None]:
    """No file of this process may become larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _failing(owner: Any, name: str, number: int, times: int) -> Iterator[None]:
    """The first calls raise OSError."""
    whole, left = getattr(owner, name), [times]

    def broken(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), "somewhere")
        return whole(*args, **kwargs)

    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, whole)


def _saved_in_spite(parent: Path) -> dict[str, Any]:
    """What each way of failing says, and what is there afterwards; rank 1's disk fails, or rank 0's folder."""
    from hybridrl.checkpoint.manifest import CheckpointError, HashingFile

    told: dict[str, Any] = {}
    rank, notes = dist.get_rank(), list[str]()
    _save(_saver(parent, notes), 1)

    def attempt(way: str, step: int, hindrance: Any, **options: Any) -> None:
        saver, text = _saver(parent, notes, **options), ""
        with hindrance:
            try:
                _save(saver, step)
            except CheckpointError as error:
                text = str(error)
        dist.barrier()
        told[way] = (text, sorted(path.name for path in parent.iterdir()))
        dist.barrier()

    one = rank == 1
    attempt("full", 2, _largest_file(20_000 if one else 1 << 40))
    attempt("full and kept one", 2, _largest_file(20_000 if one else 1 << 40), keep_last=1)
    attempt("full for a moment", 3, _failing(HashingFile, "write", errno.ENOSPC, 2 * one), retries=2)
    attempt("full without a copy", 4, _failing(HashingFile, "close", errno.EDQUOT, one), asynchronous=False)
    attempt("read-only", 5, _failing(Path, "mkdir", errno.EROFS, 9 * (rank == 0)))
    attempt("unnamed", 6, _failing(os, "rename", errno.EIO, 9 * (rank == 0)))
    attempt("well again", 7, _failing(os, "rename", errno.EIO, 0))
    return told


def test_a_save_that_fails_ends_clearly_on_all_ranks_and_loses_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_folder("qwen2")
    first, *others = pool.run(_saved_in_spite, world=2, parent=tmp_path / "checkpoints")
    assert others == [first]
    left = {way: names for way, (_, names) in first.items()}
    assert left["full"] == left["full and kept one"] == ["step-00000001"]
    assert left["full for a moment"] == left["full without a copy"] == ["step-00000001", "step-00000003"]
    assert left["read-only"] == left["unnamed"] == ["step-00000001", "step-00000003"]
    assert left["well again"] == ["step-00000003", "step-00000007"]
    assert [way for way, (text, _) in first.items() if not text] == ["full for a moment", "well again"]
    for way, word in {
        "full": "rank 1: OSError: [Errno 27] File too large",
        "full without a copy": "rank 1: OSError: [Errno 122]",
        "read-only": "rank 0: OSError: [Errno 30]",
        "unnamed": "rank 0: OSError: [Errno 5]",
    }.items():
        text = first[way][0]
        assert word in text
        assert str(tmp_path / "checkpoints") in text
        assert "those that were whole still are" in text
        assert "bytes to write" in text
        assert "free on its disk" in text


def _saved_slowly(parent: Path) -> tuple[list[str], list[str]]:
    """Rank 1's disk takes longer than a collective may: until it was said twice that it is waited for. What is there
    then, and was said."""
    from datetime import timedelta

    from hybridrl.checkpoint import save
    from hybridrl.checkpoint.files import RankWriter

    notes: list[str] = []
    usual, save.TOLD_S = save.TOLD_S, 3.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)
    whole = RankWriter.write

    def slow(self: RankWriter) -> None:
        while dist.get_rank() == 1 and len(notes) < 2:
            time.sleep(0.1)
        whole(self)

    RankWriter.write = slow  # type: ignore[method-assign]
    try:
        _save(_saver(parent, notes), 1)
    finally:
        RankWriter.write, save.TOLD_S = whole, usual  # type: ignore[method-assign]
    return [path.name for path in parent.iterdir()], notes


def test_a_disk_that_is_slower_than_a_collective_may_be_is_waited_for(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_folder("qwen2")
    for names, notes in pool.run(_saved_slowly, world=2, parent=tmp_path):
        assert names == ["step-00000001"]
        assert len(notes) >= 2
        assert set(notes) == {"the checkpoint of step 1 is waited for: rank 1 still writes"}


def _no_place(parent: Path) -> str:
    from hybridrl.checkpoint.manifest import CheckpointError

    with pytest.raises(CheckpointError) as caught:
        _saver(parent, []).check_place()
    return str(caught.value)


def test_a_place_that_cannot_be_written_to_is_told_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = pool.run(_no_place, world=2, parent=tmp_path / "file" / "checkpoints")
    assert found[0] == found[1]
    assert f"checkpoints cannot be written to {tmp_path / 'file' / 'checkpoints'}" in found[0]
    assert "rank 0: NotADirectoryError" in found[0]


def _all_broken(parent: Path) -> str:
    from hybridrl.checkpoint.load import newest_whole
    from hybridrl.checkpoint.manifest import CheckpointError

    _save(_saver(parent, []), 1)
    if dist.get_rank() == 0:
        _flip(parent / "step-00000001" / "state.pt")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        newest_whole(parent, lambda _: None)
    return str(caught.value)


def test_a_run_does_not_start_anew_by_itself_where_none_is_whole(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_folder("qwen2")
    for text in pool.run(_all_broken, world=2, parent=tmp_path):
        assert "none is whole; start anew with trainer.resume=none" in text
        assert "state.pt does not hold the bytes that were written" in text
