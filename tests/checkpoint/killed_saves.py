"""A program that saves in forked processes, kills each, and looks at what is left: `touches FOLDER STRIDE` at another
touch of the file system each, `times FOLDER RUNS` at random times.

Prints a JSON object: the number of places or runs, and what was wrong at which.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint.load import load_model, newest_whole
from hybridrl.checkpoint.manifest import CheckpointError, checkpoints, file_problems, read_manifest
from hybridrl.checkpoint.retention import remove_leftovers
from hybridrl.checkpoint.save import Saver
from hybridrl.checkpoint.shards import Model
from hybridrl.config.schema import CheckpointConfig
from hybridrl.models.families import load_spec, weight_map
from hybridrl.parallel import compat
from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout
from tests.models.tiny import tiny_folder

LONGEST_S = 0.4
"""In which a run makes some saves."""
TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def model(value: float) -> Model:
    """A model of which every weight is `value`."""
    layout = HuggingFaceLayout(weight_map(load_spec(tiny_folder("qwen2"))), [0], dtype="float32")
    tensors = {p.name: torch.full(p.shape, value) for p in layout.params(0).values()}
    return Model("policy", layout, 0, lambda: tensors)


def in_child(function: Callable[[], None]) -> int:
    """Runs it in a forked process with a world of one; the status that this ends with."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        function()
        status = 0
    finally:
        os._exit(status)


def save(parent: Path, step: int, before: Callable[[Path], None] = lambda _: None, keep_last: int = 1) -> None:
    saver = Saver(parent, CheckpointConfig(keep_last=keep_last, retries=0), 0, lambda _: None)
    before(parent)
    saver.start(step, [model(float(step))], ({"step": {"value": step}}, {}), None)
    saver.wait()


def kill_at(number: int) -> Callable[[Path], None]:
    """Ends this process by SIGKILL at the n-th time that it touches the checkpoints; -1 counts the times."""

    def install(parent: Path) -> None:
        seen = 0

        def touch() -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if number < 0:
                os.write(count_to, b".")

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in TOUCHES and str(parent) in str(arguments[0]):
                touch()

        sync = os.fsync

        def fsync(file: Any) -> None:
            touch()
            sync(file)

        os.fsync = fsync  # type: ignore[assignment]
        count_to = os.open(parent.parent / "touches", os.O_CREAT | os.O_WRONLY | os.O_APPEND) if number < 0 else -1
        sys.addaudithook(watch)

    return install


def wrong(parent: Path) -> list[str]:
    """What is not as it must be after a process was killed while it saved step 2, with step 1 there."""
    found = []
    steps = []
    for folder in checkpoints(parent):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            found.append(str(error))
            continue
        found += file_problems(folder, manifest.files, manifest.files)
        steps.append(manifest.step)
    return found if steps else [*found, "nothing is left"]


def resume(parent: Path) -> None:
    """Loads the newest, and saves again, as a restarted run does."""
    remove_leftovers(parent)
    folder = newest_whole(parent, print)
    assert folder is not None
    manifest, loaded = read_manifest(folder), model(0.0)
    load_model(folder, manifest, loaded, optimizer=False)
    assert all(bool((tensor == manifest.step).all()) for tensor in loaded.tensors().values())
    save(parent, 3)
    assert [path.name for path in parent.iterdir()] == ["step-00000003"], list(parent.iterdir())


def save_on(parent: Path, told: Path, ready: int) -> None:
    """Goes on from the newest checkpoint, and saves step after step, while the weights change already. Writes to
    `ready` before the first, and each step that is saved to `told`."""
    remove_leftovers(parent)
    found = newest_whole(parent, print)
    step = 0 if found is None else read_manifest(found).step
    saved = model(float(step))
    if found is not None:
        load_model(found, read_manifest(found), saved, optimizer=False)
        assert all(bool((tensor == step).all()) for tensor in saved.tensors().values())
    saver = Saver(parent, CheckpointConfig(keep_last=2, retries=0), 0, lambda _: None)
    report = os.open(told, os.O_CREAT | os.O_WRONLY)
    os.write(ready, b".")
    while True:
        step += 1
        for tensor in saved.tensors().values():
            tensor.fill_(float(step))
        saver.start(step, [saved], ({"step": {"value": step}}, {}), None)
        for tensor in saved.tensors().values():
            tensor.fill_(-1.0)
        saver.wait()
        os.pwrite(report, f"{step:8d}".encode(), 0)


def kill_at_times(folder: Path, runs: int) -> dict[str, Any]:
    """One run after another in one folder, each killed at a random time and followed by the next. Of three runs one is
    killed while it starts."""
    rng, parent, told = random.Random(9), folder / "checkpoints", folder / "told"
    parent.mkdir(parents=True)
    problems: dict[int, list[str]] = {}
    newest = 0
    for run in range(runs):
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                save_on(parent, told, tell)
            finally:
                os._exit(1)  # only an error comes here
        os.close(tell)
        if run % 3:
            os.read(ready, 1)
        os.close(ready)
        time.sleep(rng.uniform(0.0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        found = [] if os.WIFSIGNALED(status) else ["it ended by itself"]
        least = int((told.read_text() if told.exists() else "") or 0)
        if least:
            found += wrong(parent)
            newest = max(read_manifest(path).step for path in checkpoints(parent))
            found += [f"step {least} was saved, and the newest is {newest}"] if newest < least else []
        if found:
            problems[run] = found
    return {"runs": runs, "newest": newest, "problems": problems}


def kill_at_touches(folder: Path, stride: int) -> dict[str, Any]:
    """A save killed at each place, or each `stride`-th, with an earlier checkpoint there."""
    first = folder / "count" / "checkpoints"
    assert in_child(lambda: save(first, 1)) == 0
    shutil.copytree(first, folder / "first")
    assert in_child(lambda: save(first, 2, kill_at(-1))) == 0
    places = (first.parent / "touches").stat().st_size
    problems: dict[int, list[str]] = {}
    for number in range(1, places + 1, stride):
        parent = folder / str(number) / "checkpoints"
        shutil.copytree(folder / "first", parent)
        status = in_child(lambda parent=parent, n=number: save(parent, 2, kill_at(n)))  # type: ignore[misc]
        told = wrong(parent) + ([] if os.WIFSIGNALED(status) else ["it was not killed"])
        if in_child(lambda parent=parent: resume(parent)) != 0:  # type: ignore[misc]
            told.append("it cannot be resumed")
        if told:
            problems[number] = told
    return {"places": places, "problems": problems}


if __name__ == "__main__":
    compat.install()
    tiny_folder("qwen2")  # made once
    way = {"touches": kill_at_touches, "times": kill_at_times}[sys.argv[1]]
    print(json.dumps(way(Path(sys.argv[2]), int(sys.argv[3]))))
