"""The sizes of a recipe's model: of its folder, or, where that is not here, of the facts in `conf/model`."""

from dataclasses import fields
from pathlib import Path

from hybridrl.config.schema import Config
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import load_spec
from hybridrl.models.spec import ModelSpec
from hybridrl.reshard.explain import find_model

OWN = ("dtype", "dtypes")
"""What a copy of a model may have of its own."""


def find_spec(config: Config) -> ModelSpec:
    """Of `model.path` where that is here, else of `model.facts`. Raises ValueError where neither says anything."""
    path, facts = config.model.path, config.model.facts
    if path.startswith("builtin:") or (Path(path) / "config.json").is_file():
        return load_checked(config)
    if facts is None:
        raise ValueError(f"model.path={path}: not here, and model.facts names no file of conf/model to plan with")
    return _facts(facts)


def load_checked(config: Config) -> ModelSpec:
    """Of `model.path`. Raises ValueError where `model.facts` is another model, with every size that differs."""
    spec = load_spec(builtin.resolve(config.model.path, cache_folder()))
    if config.model.facts is None:
        return spec
    stated = _facts(config.model.facts)
    names = [field.name for field in fields(ModelSpec) if field.name not in OWN]
    wrong = [
        f"{name}={getattr(spec, name)!r}, stated {getattr(stated, name)!r}"
        for name in names
        if getattr(spec, name) != getattr(stated, name)
    ]
    if wrong:
        raise ValueError(f"model.facts={config.model.facts} is another model than model.path: {'; '.join(wrong)}")
    return spec


def _facts(name: str) -> ModelSpec:
    try:
        return find_model(name)
    except ValueError as error:
        raise ValueError(f"model.facts={name}: {error}") from None
