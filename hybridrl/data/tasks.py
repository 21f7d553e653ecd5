"""reasoning-gym: problems made on the spot, any of its data sets by name, each with a scorer of its own."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.data.errors import DataError

METADATA_KEY = "reasoning_gym"
"""Where a problem's entry and its data set's recipe stand in the prompt's metadata, for the judge."""


def create_dataset(task: str, args: Mapping[str, Any], seed: int, size: int) -> Any:
    """The data set `task` with those arguments; `size` problems that depend on `seed` alone.

    Raises DataError for an unknown name, unknown arguments and values that the data set refuses.
    """
    import reasoning_gym  # it takes seconds to import
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        import difflib

        near = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0.4)
        raise DataError(
            f"data.task={task!r}: reasoning-gym has no such data set; near: {', '.join(near) or 'none'} "
            f"(all: python -c 'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))')"
        )
    _, config = DATASETS[task]
    known = [field.name for field in dataclasses.fields(config)]
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise DataError(f"data.task_args: {task} does not know {', '.join(unknown)}; it knows {', '.join(known)}")
    clash = sorted({"seed", "size"} & set(args))
    if clash:
        raise DataError(f"data.task_args: give {', '.join(clash)} as data.seed and data.size instead")
    values = dict(args)
    if task == "composite":
        spec = set(inspect.signature(DatasetSpec).parameters)
        values["datasets"] = [DatasetSpec(**{k: v for k, v in part.items() if k in spec}) for part in args["datasets"]]
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **values)
    except (AssertionError, ValueError, TypeError) as error:
        raise DataError(f"data.task_args={dict(args)} were refused by {task}: {error or 'assertion failed'}") from error


def problems(task: str, args: Mapping[str, Any], seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows with `question`, `answer` and the entry under `METADATA_KEY`, as `hybridrl.rewards` wants it."""
    dataset = create_dataset(task, args, seed, size)
    recipe = {"task": task, "args": dict(args), "seed": seed, "size": size}
    for index in range(size):
        entry = dataset[index]
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            METADATA_KEY: {**recipe, "entry": entry},
        }
