"""The entry point of a program: command line → a checked configuration → the task, or every mistake and status 2.

def train(config: Config) -> None: ...

main = hydra_main(train)

if __name__ == "__main__":
    main()
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser

from hybridrl.config.compose import PRIMARY, Composition, ConfigError, compose, compose_all
from hybridrl.config.folders import CONF
from hybridrl.config.launch import Launch, refuse
from hybridrl.config.save import save_config
from hybridrl.config.schema import Config
from hybridrl.config.validate import Model, validate
from hybridrl.config.validate.bounds import CHOICES

__all__ = ["ConfigError", "compose", "hydra_main", "save_config"]

Names = Mapping[str, Iterable[str]]
_READ = ("model.", "data.", "evaluation.", "rollout.max_", "trainer.prompts_per_step", "warm_start.")
"""Keys that say what is read: where one is wrong, reading would only tell the same mistake again."""


def hydra_main(
    task: Callable[..., None],
    *,
    spec: Callable[[Config], Model | None] | None = None,
    device: Callable[[Config], str] | None = None,
    names: Names | None = None,
    read: Callable[[Config], Any] | None = None,
    further: Callable[[Config], Iterable[str]] | None = None,
) -> Callable[[], None]:
    """A `main()` that reads `sys.argv` as hydra does and calls `task` with a configuration that passed every check.

    `spec` reads the model's sizes (it may raise ValueError or OSError: a mistake like the others), `device` says `cpu`
    or `cuda` (ValueError: a device that is not there), and `names` gives the registered names of keys that take one.
    They are asked before anything is started, and let the checks say more. `further` tells mistakes that only what will
    run can know, such as the options of an installed package. `read` reads what the run needs, raises
    ConfigError with the mistakes in it, and what it returns is the task's second argument. A ConfigError that the task
    raises is reported in the same way, so it may judge what only it can see. `--cfg`, `--help` and their like are
    hydra's own.
    """

    @functools.wraps(task)
    def main() -> None:
        launch = Launch.from_environment()
        args = get_args_parser().parse_intermixed_args()
        if args.help or args.hydra_help or args.info is not None or args.shell_completion:
            return _hydra(task, args.overrides, args.overrides)
        problems = _unsupported(args)
        found = compose_all(args.overrides, args.config_dir)
        problems += [p.text for p in found.problems if not (args.cfg and p.missing)]
        inputs: tuple[Any, ...] = ()
        if not args.cfg:
            problems += found.untainted(_judge(found, launch, spec, device, names))
            if further is not None:
                problems += found.untainted(list(further(found.config)))
            if read is not None and found.whole and not any(text.startswith(_READ) for text in problems):
                inputs = _read_inputs(read, found, problems)
        if problems:
            refuse(problems, launch)
        if args.cfg:
            return _hydra(task, args.overrides, _forced(args.overrides, found))
        try:
            task(found.config, *inputs)
        except ConfigError as error:
            refuse(error.problems, launch)
        return None

    return main


def _read_inputs(read: Callable[[Config], Any], found: Composition, problems: list[str]) -> tuple[Any, ...]:
    """What is read; nothing, and new problems, where it cannot be."""
    try:
        return (read(found.config),)
    except ConfigError as error:
        problems += found.untainted(error.problems)
    return ()


def _judge(
    found: Composition,
    launch: Launch,
    spec: Callable[[Config], Model | None] | None,
    device: Callable[[Config], str] | None,
    names: Names | None,
) -> list[str]:
    """Combinations that cannot run, as far as they can be known."""
    config, kind, absent = found.config, None, []
    try:
        kind = device(config) if device and config.trainer.device in CHOICES["trainer.device"] else None
    except ValueError as error:
        absent = [str(error)]
    problems = validate(config, world=launch.world, local_world=launch.local_world, device=kind, names=names)
    unreadable = any("model.path" in text for text in (*problems, *(p.text for p in found.problems)))
    if spec is None or unreadable or not found.whole:
        return absent + problems
    try:
        model = spec(config)
    except (ValueError, OSError) as error:
        return [*absent, *problems, f"model.path={config.model.path}: {error}"]
    return absent + validate(config, model, launch.world, local_world=launch.local_world, device=kind, names=names)


def _unsupported(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.multirun:
        problems.append("--multirun: a program runs one configuration; start one run for each value")
    if args.experimental_rerun is not None:
        problems.append("--experimental-rerun: not supported; pass the overrides again")
    if args.config_path is not None or args.config_name is not None:
        problems.append(
            "--config-path, --config-name: put a recipe of yours into DIR/recipe/ and pass --config-dir DIR"
        )
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        problems.append(f"--config-dir={args.config_dir}: no such folder")
    return problems


def _forced(overrides: Sequence[str], found: Composition) -> list[str]:
    """The overrides as hydra takes them: it wants a `+` where a section is open, and none where a key is known."""
    groups = [o for o in overrides if o.lstrip("+") not in found.assignments]
    return [*groups, *(f"++{assignment}" for assignment in found.assignments)]


def _hydra(task: Callable[..., None], given: Sequence[str], overrides: Sequence[str]) -> None:
    """Lets hydra show what it is asked to, with `overrides` for those given, behind all flags as it needs them."""

    @functools.wraps(task)
    def unreachable(_: object) -> None:
        raise AssertionError("hydra was asked to show, not to run")

    before = sys.argv
    sys.argv = [before[0], *(a for a in before[1:] if a not in given), *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=PRIMARY)(unreachable)()
    finally:
        sys.argv = before
