"""A program that saves in forked processes, kills each at another touch of the file system, and looks at what is left.

Prints a JSON object: the number of places, and what was wrong at which.
"""

import json
import os
import signal
import sys
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


def main(folder: Path, stride: int) -> None:
    compat.install()
    first = folder / "count" / "checkpoints"
    assert in_child(lambda: save(first, 1)) == 0
    assert in_child(lambda: save(first, 2, kill_at(-1))) == 0
    places = (first.parent / "touches").stat().st_size
    problems: dict[int, list[str]] = {}
    for number in range(1, places + 1, stride):
        parent = folder / str(number) / "checkpoints"
        assert in_child(lambda parent=parent: save(parent, 1)) == 0  # type: ignore[misc]
        status = in_child(lambda parent=parent, n=number: save(parent, 2, kill_at(n)))  # type: ignore[misc]
        told = wrong(parent) + ([] if os.WIFSIGNALED(status) else ["it was not killed"])
        if in_child(lambda parent=parent: resume(parent)) != 0:  # type: ignore[misc]
            told.append("it cannot be resumed")
        if told:
            problems[number] = told
    print(json.dumps({"places": places, "problems": problems}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
