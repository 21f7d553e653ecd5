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


def hydra_main(
    task: Callable[[Config], None],
    *,
    spec: Callable[[Config], Model | None] | None = None,
    device: Callable[[Config], str] | None = None,
    names: Names | None = None,
) -> Callable[[], None]:
    """A `main()` that reads `sys.argv` as hydra does and calls `task` with a configuration that passed every check.

    `spec` reads the model's sizes (it may raise ValueError or OSError: a mistake like the others), `device` says `cpu`
    or `cuda`, and `names` gives the registered names of keys that take one. They are asked before anything is
    started, and let the checks say more. A ConfigError that the task raises is reported in the same way, so it may
    judge what only it can see. `--cfg`, `--help` and their like are hydra's own.
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
        if not args.cfg:
            problems += found.untainted(_judge(found, launch, spec, device, names))
        if problems:
            refuse(problems, launch)
        if args.cfg:
            return _hydra(task, args.overrides, _forced(args.overrides, found))
        try:
            task(found.config)
        except ConfigError as error:
            refuse(error.problems, launch)
        return None

    return main


def _judge(
    found: Composition,
    launch: Launch,
    spec: Callable[[Config], Model | None] | None,
    device: Callable[[Config], str] | None,
    names: Names | None,
) -> list[str]:
    """Combinations that cannot run, as far as they can be known."""
    config = found.config
    kind = device(config) if device and config.trainer.device in CHOICES["trainer.device"] else None
    problems = validate(config, world=launch.world, local_world=launch.local_world, device=kind, names=names)
    unreadable = any("model.path" in text for text in (*problems, *(p.text for p in found.problems)))
    if spec is None or unreadable or not found.whole:
        return problems
    try:
        model = spec(config)
    except (ValueError, OSError) as error:
        return [*problems, f"model.path={config.model.path}: {error}"]
    return validate(config, model, launch.world, local_world=launch.local_world, device=kind, names=names)


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


def _hydra(task: Callable[[Config], None], given: Sequence[str], overrides: Sequence[str]) -> None:
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
