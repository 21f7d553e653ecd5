"""Overrides → configuration: hydra finds and merges the files, the schema is enforced here, all mistakes at once.

Hydra itself stops at its first mistake, and turns text into numbers where it can. So the files are merged without the
schema, the overrides are laid on top, and `hybridrl.config.strict` builds the dataclasses from what comes out.
`key=value`, `+key=value` and `++key=value` mean the same here: an unknown key is a mistake in each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridrl.config.defaults import resolve_defaults
from hybridrl.config.schema import Config
from hybridrl.config.strict import Problem, build, untainted
from hybridrl.config.suggest import closest

PRIMARY = "hybridrl"
"""The primary file, which hydra composes with the schema (for `--cfg`)."""
_GROUPS = "hybridrl_groups"
FACTS = {
    "model": "the sizes that model.facts names; a model is chosen by model.path",
    "hardware": "what plan.hardware names",
    "interconnect": "the links that a file of conf/hardware names",
}
"""Folders of `conf/` that hold facts for the dry run and no settings."""
_FILE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError)

ConfigStore.instance().store(name="hybridrl_schema", node=Config, provider="hybridrl")


class ConfigError(ValueError):
    """A configuration that cannot run; `problems` has every mistake, one text each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"{i}. {text}" for i, text in enumerate(self.problems, 1)))


@dataclass(frozen=True)
class Composition:
    """What was composed, and what is wrong with it: fields that a problem names hold their defaults."""

    config: Config
    problems: tuple[Problem, ...]
    whole: bool = True
    """False where a file is missing or cannot be merged, so that much of the configuration is unknown."""
    assignments: tuple[str, ...] = ()
    """The overrides that set a key, as `key=value` (the others choose a file of a group)."""

    def untainted(self, texts: Sequence[str]) -> list[str]:
        """Those of `texts` that mention no key which is already wrong for another reason; none if not `whole`."""
        return untainted(texts, self.problems) if self.whole else []


def compose(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """The configuration that `python -m hybridrl.train OVERRIDES` would run with, derived defaults filled in.

    Raises ConfigError with every unknown key or name, wrong type and missing value. Combinations are not judged here:
    `hybridrl.config.validate.validate` does that. `config_dir` is that of `compose_all`.
    """
    found = compose_all(overrides, config_dir)
    if found.problems:
        raise ConfigError([p.text for p in found.problems])
    return found.config


def compose_all(overrides: Sequence[str], config_dir: str | None = None) -> Composition:
    """As `compose`, but returns the mistakes. `config_dir` is searched for further groups, behind our own."""
    problems: list[Problem] = []
    loader = _loader(config_dir)
    parsed = list(_parse(overrides, problems))
    groups = [o for o in parsed if _is_group(o, loader)]
    chosen = [o for o in groups if _exists(o, loader, problems)]
    tree, merged = _load(loader, chosen, problems)
    assigned = [o for o in parsed if o not in groups and _settable(o, problems)]
    for override in assigned:
        _set(tree, override, problems)
    config, wrong = build(Config, _resolve(tree, problems))
    whole = merged and len(chosen) == len(groups)
    problems += [p for p in wrong if whole or not p.missing]
    lines = tuple(str(o.input_line).lstrip("+") for o in assigned)
    return Composition(resolve_defaults(config), tuple(problems), whole, lines)


def _loader(config_dir: str | None) -> ConfigLoaderImpl:
    search_path = create_config_search_path(None)
    if config_dir is not None:
        behind = SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=f"file://{config_dir}", anchor=behind)
    return ConfigLoaderImpl(config_search_path=search_path)


def _parse(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for text in overrides:
        try:
            yield from parser.parse_overrides([text])
        except HydraException as error:
            reason = " ".join(str(error).split())
            problems.append(Problem((), f"'{text}' is no override of the form key=value: {reason}"))


def _is_group(override: Override, loader: ConfigLoaderImpl) -> bool:
    is_group = override.package is not None or loader.repository.group_exists(override.key_or_group)
    return is_group and (override.is_sweep_override() or not isinstance(override.value(), dict))


def _exists(override: Override, loader: ConfigLoaderImpl, problems: list[Problem]) -> bool:
    """Whether the group has the chosen file."""
    group, line = override.key_or_group, override.input_line
    if override.is_sweep_override():
        problems.append(Problem((group,), f"{line}: a sweep; a run takes one value of {group}"))
        return False
    if group in FACTS:
        problems.append(Problem((group,), f"{line}: conf/{group} holds {FACTS[group]}"))
        return False
    name = override.value()
    options = ", ".join(loader.get_group_options(group))
    if not isinstance(name, str) or override.is_delete():
        problems.append(Problem((group,), f"{line}: expected the name of one {group} (known: {options})"))
        return False
    if loader.repository.config_exists(f"{group}/{name}"):
        return True
    near = closest(name, loader.get_group_options(group))
    advice = f"did you mean '{near}'? " if near else ""
    problems.append(Problem((group,), f"{group}={name}: there is no {group} '{name}'; {advice}known: {options}"))
    return False


def _load(loader: ConfigLoaderImpl, chosen: list[Override], problems: list[Problem]) -> tuple[DictConfig, bool]:
    """Our defaults under the merged files, untyped and open; the defaults alone, and False, where they do not merge."""
    tree = OmegaConf.create(asdict(Config()))
    try:
        lines = [str(o.input_line) for o in chosen]
        files = loader.load_configuration(_GROUPS, lines, RunMode.RUN, from_shell=False)
        OmegaConf.set_struct(files, False)
        files.pop("hydra")
        _check_package(files, problems)
        tree.merge_with(files)
    except _FILE_ERRORS as error:
        reasons = (" ".join(str(e).split()) for e in (error, error.__cause__) if e is not None)
        problems.append(Problem((), "the configuration files cannot be merged: " + ": ".join(filter(None, reasons))))
        return OmegaConf.create(asdict(Config())), False
    return tree, True


def _check_package(files: DictConfig, problems: list[Problem]) -> None:
    """What a recipe sets without its first line stands under `recipe`, where nothing looks for it."""
    if files.pop("recipe", None) is not None:
        problems.append(
            Problem(("recipe",), "recipe: a recipe sets nothing without the first line `# @package _global_`; add it")
        )


def _settable(override: Override, problems: list[Problem]) -> bool:
    key, line = override.key_or_group, override.input_line
    if override.is_sweep_override():
        problems.append(Problem((key,), f"{line}: a sweep; a run takes one value, a list is written {key}=[…,…]"))
    elif override.is_delete():
        problems.append(Problem((key,), f"{line}: a key cannot be deleted; set it to another value"))
    elif override.is_hydra_override():
        advice = "the run folder is trainer.output_dir" if key.startswith("hydra.run") else "hydra only composes here"
        problems.append(Problem((key,), f"{key}: hydra's own settings have no effect; {advice}"))
    else:
        return True
    return False


def _set(tree: DictConfig, override: Override, problems: list[Problem]) -> None:
    try:
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        key = override.key_or_group
        problems.append(Problem((key,), f"{override.input_line}: cannot be set: {str(error).splitlines()[0]}"))


def _resolve(tree: DictConfig, problems: list[Problem]) -> dict[Any, Any]:
    """Plain values with `${…}` filled in; a value that cannot be gets its default, and a problem."""
    while True:
        try:
            plain = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            key = error.full_key
            if not key:
                raise
            problems.append(Problem((key,), f"{key}: {str(error).splitlines()[0]}"))
            OmegaConf.update(tree, key, OmegaConf.select(OmegaConf.create(asdict(Config())), key), merge=False)
        else:
            assert isinstance(plain, dict)
            return plain
