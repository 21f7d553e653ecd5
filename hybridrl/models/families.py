"""The families of models that can be trained, found by `model_type`.

A family is a module with `parse(config) -> ModelSpec` and `NAMES`, the checkpoint's names by role; one whose checkpoint
holds more than the decoder (see `hybridrl.models.names`) has `tensors(spec)` too.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.models import names
from hybridrl.models.settings import UnsupportedModelError
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import WeightMap

FAMILIES = ("deepseek_v3", "glm4_moe", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type`; each is the name of a module of this package."""

__all__ = [
    "FAMILIES",
    "UnsupportedModelError",
    "family",
    "load_spec",
    "spec_from_config",
    "trained_spec",
    "weight_map",
    "with_scalar_head",
]


def family(model_type: str) -> ModuleType:
    """The family's module. Raises UnsupportedModelError for a type that is not in `FAMILIES`."""
    if model_type not in FAMILIES:
        problem = f"model_type={model_type!r}; supported: {', '.join(FAMILIES)}"
        raise UnsupportedModelError("the architecture", [problem])
    return importlib.import_module(f"hybridrl.models.{model_type}")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a Hugging Face `config.json` describes.

    Raises UnsupportedModelError, which lists every setting that cannot be honoured.
    """
    spec: ModelSpec = family(str(config.get("model_type"))).parse(config)
    if not str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        return spec
    labels = len(config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"})  # transformers writes all but its default two
    if labels != 1:
        raise UnsupportedModelError("a sequence classifier", [f"{labels} labels; supported: 1, a scalar head"])
    return with_scalar_head(spec)


def with_scalar_head(spec: ModelSpec) -> ModelSpec:
    """The same layers with a scalar head: the critic or reward model of a language model."""
    return replace(spec, scalar_head=True)


def load_spec(folder: Path | str) -> ModelSpec:
    """The model of a Hugging Face folder; FileNotFoundError without its `config.json`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a model is a Hugging Face folder with config.json")
    return spec_from_config(json.loads(path.read_text(encoding="utf-8")))


def trained_spec(folder: Path | str) -> ModelSpec:
    """`load_spec` without prediction layers (MTP): neither a loss nor a rollout uses them, so they are left out."""
    return replace(load_spec(folder), mtp_layers=0)


def weight_map(spec: ModelSpec) -> WeightMap:
    """All tensors of the model as its checkpoint files name, shape and type them, in layer order."""
    module = family(spec.family)
    if hasattr(module, "tensors"):
        return WeightMap(spec, module.tensors(spec))
    return WeightMap(spec, names.tensors(spec, module.NAMES))
