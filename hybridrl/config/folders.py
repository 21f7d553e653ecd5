"""Where `conf/` and `recipes/` lie: inside the package in a wheel, beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


CONF = _folder("conf")
"""The hydra groups and the two primary files."""
RECIPES = _folder("recipes")
"""Whole experiments: the hydra group `recipe`."""
