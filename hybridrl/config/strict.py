"""A tree of plain values → the dataclasses of the schema, with strict types, reporting every mistake.

Text is no number, a bool no int, a float with a fraction or without no int; an int serves as a float. None is taken
only where the schema says `| None`. Unknown keys and missing mandatory values are mistakes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hybridrl.config.suggest import closest, elsewhere

MANDATORY = "???"
T = TypeVar("T")

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Problem:
    """One mistake, and the keys that it makes doubtful."""

    keys: tuple[str, ...]
    text: str
    missing: bool = False
    """The value is only missing, not wrong."""


def untainted(texts: Sequence[str], problems: Iterable[Problem]) -> list[str]:
    """Those of `texts` that mention no key which a problem has already made doubtful."""
    keys = {key for problem in problems for key in problem.keys}
    return [t for t in texts if not any(re.search(rf"(?<![\w.]){re.escape(k)}(?!\w)", t) for k in keys)]


def build(kind: type[T], tree: Any) -> tuple[T, list[Problem]]:
    """An instance of the dataclass `kind`, and all mistakes; where there is a mistake the field has its default."""
    problems: list[Problem] = []
    known = list(schema_keys(kind))
    value = _section(kind, tree, "", known, problems)
    return value, problems


def schema_keys(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted, sections included."""
    for name, part in get_type_hints(kind).items():
        yield prefix + name
        if is_dataclass(part) and isinstance(part, type):
            yield from schema_keys(part, f"{prefix}{name}.")


def describe(value: Any) -> str:
    """A value as a message shows it: its kind and itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kind = {str: "the text ", int: "the integer ", float: "the number ", list: "the list ", dict: "the section "}
    return f"{kind.get(type(value), type(value).__name__ + ' ')}{value!r}"


def expected(kind: Any) -> str:
    """A type of the schema in words."""
    if get_origin(kind) is UnionType:
        return " or ".join(expected(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"a list, each item {expected(get_args(kind)[0])}"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "a section of keys and values"
    return _WORDS[kind]


def _section(kind: type[T], tree: Any, prefix: str, known: list[str], problems: list[Problem]) -> T:
    kinds, is_section = get_type_hints(kind), isinstance(tree, dict)
    if not is_section:
        key = prefix.rstrip(".") or "the configuration"
        problems.append(Problem((key,), f"{key}: expected a section of keys and values, found {describe(tree)}"))
        tree = {}
    unknown = [_unknown(prefix, str(name), list(kinds), known) for name in tree if name not in kinds]
    problems += unknown
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]  # T is a dataclass, which `type[T]` cannot say
        found: list[Problem] = []
        value = tree.get(field.name, _default(field))
        values[field.name] = _value(kinds[field.name], value, prefix + field.name, known, found, field)
        problems += [p for p in found if not p.missing or (is_section and not _meant(p, unknown))]
    return kind(**values)


def _meant(missing: Problem, unknown: Iterable[Problem]) -> bool:
    """Whether what is missing may be there, under a misspelt key."""
    (key,) = missing.keys
    return any(key == near or key.startswith(f"{near}.") for problem in unknown for near in problem.keys)


def _unknown(prefix: str, name: str, siblings: list[str], known: list[str]) -> Problem:
    key = prefix + name
    near = closest(name, siblings) or closest(key, [k for k in known if not key.startswith(f"{k}.")])
    meant = [prefix + near if near in siblings else near] if near else elsewhere(key, known)
    advice = "did you mean " + " or ".join(f"'{m}'" for m in meant) + "?" if meant else f"known: {', '.join(siblings)}"
    return Problem((key, *meant), f"{key}: unknown key; {advice}")


def _value(
    kind: Any, value: Any, key: str, known: list[str], problems: list[Problem], field: Field[Any] | None = None
) -> Any:
    """The value in its type; its default, and a new problem, where it is wrong."""
    default = None if field is None else _default(field)
    if isinstance(value, str) and value == MANDATORY:
        problems.append(Problem((key,), f"{key}: missing; expected {expected(kind)}: give it as {key}=…", missing=True))
        return default
    if is_dataclass(kind) and isinstance(kind, type):
        return _section(kind, value, f"{key}.", known, problems)
    if get_origin(kind) is list and isinstance(value, list):
        (item,) = get_args(kind)
        return [_value(item, v, f"{key}[{i}]", known, problems) for i, v in enumerate(value)]
    if get_origin(kind) is dict and isinstance(value, dict):
        return value
    if value == "None" and isinstance(value, str):
        problems.append(Problem((key,), f"{key}: expected {expected(kind)}, found the text 'None'; none is spelt null"))
        return default
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if type(value) in options:
        return value
    if float in options and type(value) is int:
        return float(value)
    advice = _advice(options, value)
    problems.append(Problem((key,), f"{key}: expected {expected(kind)}, found {describe(value)}{advice}"))
    return default


def _advice(options: tuple[Any, ...], value: Any) -> str:
    if isinstance(value, str) and not {str, list, dict} & set(options):
        try:
            float(value)
        except ValueError:
            return ""
        return "; without the quotes it is a number"
    if str in options and isinstance(value, int | float):
        return f"; quote it twice on a command line: \"'{value}'\""
    return ""


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return _plain(made) if is_dataclass(made) else made
    return field.default


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: _default(f) for f in fields(value)}
