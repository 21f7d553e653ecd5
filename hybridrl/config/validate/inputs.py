"""What a run reads: model folder, tokenizer, data, judges, and the engine's package."""

import re
from collections.abc import Iterator, Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config, DataConfig
from hybridrl.config.strict import MANDATORY
from hybridrl.files import standing, takes_files

BUILTIN = "builtin:"
BUILTIN_MODELS = ("tiny_moe", "tiny_deepseek", "tiny_glm4")
BUILTIN_DATA = ("tiny_sums", "tiny_pairs", "tiny_verdicts")
JUDGES = ("reward_model", "exact", "numeric", "math", "reasoning_gym")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def input_problems(config: Config, files: bool) -> Iterator[str]:
    """Mistakes in what is read; `files` looks at this machine's files and packages too."""
    yield from _data_keys(config)
    for i, judge in enumerate(config.rewards.judges):
        if judge.name == "reward_model":
            yield from _reward_model(f"rewards.judges[{i}].args", judge.args, files)
        elif judge.name not in (*JUDGES, MANDATORY):
            yield from _judge(f"rewards.judges[{i}].name={judge.name}", judge.name, files)
    if files:
        yield from _own_folder(config.trainer.output_dir)
        for key, folder in (
            ("trainer.output_dir", config.trainer.output_dir),
            ("checkpoint.dir", config.checkpoint.dir),
            ("memory.arena_dir", config.memory.arena_dir),
        ):
            if folder is not None:
                yield from _written_folder(key, folder)
        yield from _model_folder("model.path", config.model.path)
        for key in ("critic", "teacher"):
            if (path := getattr(config, key).path) is not None:
                yield from _model_folder(f"{key}.path", path)
        if config.model.tokenizer not in (None, config.model.path):
            yield from _tokenizer(str(config.model.tokenizer))
        yield from _data_files(config)
        yield from _packages(config)


def _packages(config: Config) -> Iterator[str]:
    """Packages that the run needs beyond those that are always installed."""
    project = config.trainer.wandb_project
    if project is not None and find_spec("wandb") is None:
        yield f"trainer.wandb_project={project}: wandb is not installed here; pip install wandb"
    if is_supervised(config):
        return
    if config.rewards.pool == "ray" and find_spec("ray") is None:
        yield "rewards.pool=ray: Ray is not installed here; pip install 'hybridrl[ray]'"
    if config.rollout.engine == "sglang" and find_spec("sglang") is None:
        yield "rollout.engine=sglang: SGLang is not installed here; pip install 'hybridrl[sglang]'"


def _reward_model(setting: str, args: Mapping[str, Any], files: bool) -> Iterator[str]:
    path = args.get("path")
    if set(args) != {"path"} or not isinstance(path, str):
        given = ", ".join(args) or "none"
        yield f"{setting}: found {given}; a reward_model takes one argument, path, the Hugging Face folder of the model"
    elif files:
        yield from _model_folder(f"{setting}.path", path)


def _judge(setting: str, name: str, files: bool) -> Iterator[str]:
    if not _FUNCTION.fullmatch(name):
        yield f"{setting}: unknown judge; known: {', '.join(JUDGES)}, or module:function of your own"
    elif files and find_spec(package := name.partition(":")[0].partition(".")[0]) is None:
        yield (
            f"{setting}: there is no module or package '{package}' in {Path.cwd()} or on PYTHONPATH; add the folder "
            "that holds it to PYTHONPATH"
        )


def _own_folder(path: str) -> Iterator[str]:
    """A run folder that could not be renamed, as an earlier run's is."""
    if Path(path).name in ("", ".."):
        yield (
            f"trainer.output_dir='{path}' names no folder of its own, which a later run could set aside: expected a "
            "name, as outputs/run"
        )


def _written_folder(key: str, path: str) -> Iterator[str]:
    """Mistakes that would only show when the first results are written."""
    place = standing(Path(path))
    if not place.is_dir():
        yield f"{key}={path}: {place} is a file; expected a folder, or a name that is free"
    elif not takes_files(place):
        yield f"{key}={path}: {place} cannot be written to"


def _builtin(key: str, path: str, known: tuple[str, ...]) -> Iterator[str]:
    if path.removeprefix(BUILTIN) not in known:
        yield f"{key}={path}: unknown; known: {', '.join(BUILTIN + name for name in known)}"


def _model_folder(key: str, path: str) -> Iterator[str]:
    if path.startswith(BUILTIN):
        yield from _builtin(key, path, BUILTIN_MODELS)
    elif path != MANDATORY and not (Path(path) / "config.json").is_file():
        what = "has no config.json" if Path(path).is_dir() else "is no folder"
        yield f"{key}={path}: {what}; expected a Hugging Face model folder (relative to {Path.cwd()}), or builtin:NAME"


def _tokenizer(path: str) -> Iterator[str]:
    if path.startswith(BUILTIN):
        yield from _builtin("model.tokenizer", path, BUILTIN_MODELS)
    elif path != MANDATORY and not Path(path).is_dir():
        yield f"model.tokenizer={path}: no such folder (relative to {Path.cwd()})"


def _data_keys(config: Config) -> Iterator[str]:
    data, usual = config.data, DataConfig()
    if data.source == "reasoning_gym":
        if data.task is None:
            yield "data.source=reasoning_gym needs data.task, the name of a reasoning-gym data set (as chain_sum)"
        if data.path is not None:
            yield f"data.path={data.path} has no effect with data.source=reasoning_gym; leave it null"
        return
    if data.path is None:
        yield f"data.path is missing: data.source={data.source} reads a file or folder"
    if data.task is not None:
        yield f"data.task={data.task} has no effect with data.source={data.source}; set data.source=reasoning_gym"
    for name in ("task_args", "size"):
        if (value := getattr(data, name)) != getattr(usual, name):
            yield f"data.{name}={value} has no effect with data.source={data.source}; set data.source=reasoning_gym"
    yield from split_problems("data.split", data.split, data.source)


def _data_files(config: Config) -> Iterator[str]:
    data = config.data
    if data.source != "reasoning_gym" and data.path is not None:
        yield from data_file_problems("data.path", data.path, data.source)


def split_problems(key: str, split: str | None, source: str) -> Iterator[str]:
    """A split of what has none."""
    if split is not None and source != "dataset":
        yield f"{key}={split} has no effect with data.source={source}; only a `dataset` has splits"


def data_file_problems(key: str, path: str, source: str) -> Iterator[str]:
    """Why rows cannot be there."""
    if path.startswith(BUILTIN):
        yield from _builtin(key, path, BUILTIN_DATA)
    elif not Path(path).exists() and not glob(path, recursive=True):
        yield f"{key}={path}: no such file, folder or match (relative to {Path.cwd()})"
    elif source == "dataset" and not Path(path).is_dir():
        yield f"{key}={path}: data.source=dataset expects a folder written by Dataset.save_to_disk"
