"""Judges: functions that score one response. Each rule is told in the docstring of its module.

A judge is `judge(response, answer, metadata, **args)`. `response` is the policy's own text, `answer` the prompt's
reference (None where it has none), `metadata` the prompt's other fields, and `args` come from the configuration.
It returns a number, or a dict with a number under `score` and further numbers to be recorded. None says that it cannot
judge (no reference, say), which counts as a failure of the judge. Judges run in worker processes (`rewards.pool`), so
they may be slow or die, and they are imported by name: this module imports none of them.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Judge = Callable[..., Any]

BUILTIN: Mapping[str, str] = {
    "exact": "hybridrl.rewards.judges.exact:exact",
    "numeric": "hybridrl.rewards.judges.numeric:numeric",
    "math": "hybridrl.rewards.judges.math_answer:math_answer",
    "reasoning_gym": "hybridrl.rewards.judges.reasoning:reasoning_gym_score",
}


def resolve(name: str, args: Mapping[str, Any]) -> Judge:
    """The judge of that name (a key of `BUILTIN`, or `module:function`), imported.

    Raises ValueError if there is none, or if it cannot be called as `judge(response, answer, metadata, **args)`.
    """
    target = BUILTIN.get(name, name)
    module_name, separator, function_name = target.partition(":")
    if not separator or not module_name or not function_name:
        raise ValueError(f"judge {name!r}: expected one of {', '.join(BUILTIN)}, or module:function")
    try:
        judge = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"judge {name!r} cannot be imported: {error}") from error
    try:
        inspect.signature(judge).bind("response", "answer", {}, **args)
    except TypeError as error:
        words = ", ".join(["response", "answer", "metadata", *(f"{key}=…" for key in args)])  # a value may be a secret
        raise ValueError(f"judge {name!r} cannot be called as judge({words}): {error}") from error
    return judge
