"""Stands where torchvision would be, whose wheels want a CUDA build of torch. Its names can be imported; nothing runs.

SGLang imports image transforms with its multimodal models. No language model uses them.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

__version__ = "0.0.0+stub"

InterpolationMode = enum.StrEnum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)


def _name(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any `torchvision.…` module, each with any name in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith(_PREFIX) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _name  # type: ignore[method-assign]
        if spec.name == "torchvision.transforms":
            # transformers keys a table by its members
            setattr(module, InterpolationMode.__name__, InterpolationMode)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


_PREFIX = "torchvision."
__getattr__ = _name
sys.meta_path.append(_Submodules())
