r"""`math`: the response's final answer is mathematically the reference answer, judged with the help of math-verify.

Which text is the answer: `boxes`. How notation is read: `notation`. When values are equal: `equality`. math-verify
parses LaTeX, and decides the kinds that `equality` has no exact rule for (relations, unions of sets, functions).

Policies: `50\%` equals 0.5, and 50. Units, degrees and currency are not compared. Decimals are exact: 0.333 is not 1/3
and 3.14 is not \pi. `x = 5` equals 5. A set is unordered, a tuple is not; a point is no set; `7 or 8` is not 7.
A number's base counts where both state one (`11_2`). Clock times, ratios (`12:00`) and worded answers are compared as
text. Answers whose value cannot be computed soon (power towers, huge factorials, deep nesting) are equal only to
themselves as written.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig, NormalizationConfig

from hybridrl.rewards.judges import equality, notation
from hybridrl.rewards.judges.boxes import final_answer

MAX_LENGTH = 1_000
"""Characters of an answer that is parsed; longer ones are compared as text."""
MAX_DEPTH = 25
"""Nested brackets or braces of an answer that is parsed: the parser's time grows steeply with depth."""
_PARSING = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        ),
    )
]
_COLONS = re.compile(r"-?[0-9.]+(?:\s*:\s*[0-9.]+)+(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
_TWO_NUMBERS = re.compile(r"(?<![_^0-9.])(?<!frac )[0-9.]+\s+[0-9]")
_OPTION = re.compile(r"\(?[A-J]\)?")


def math_answer(
    response: str, answer: str | None, metadata: Mapping[str, Any], *, require_box: bool = False
) -> float | None:
    """1.0 if the response's final answer equals the reference, else 0.0; None if there is no reference.

    With `require_box` a response without a box scores 0. The reference may be bare or stand in a box of its own.
    """
    gold = (final_answer(answer) if answer and "boxed" in answer else answer) or ""
    if not (gold := notation.clean(gold)):
        return None
    if require_box and "boxed" not in response and "box{" not in response:
        return 0.0
    found = final_answer(response)
    pred = "" if found is None else notation.clean(found)
    return float(bool(pred) and equal(gold, pred))


def equal(gold: str, pred: str) -> bool:
    """Whether two cleaned answers are equal; the reference goes first."""
    if notation.compact(gold) == notation.compact(pred):
        return True
    if (
        notation.is_worded(gold)
        or (notation.is_worded(pred) and not notation.is_number(gold))
        or _OPTION.fullmatch(gold)
    ):
        return _same_words(gold, pred)
    if _COLONS.fullmatch(gold) and _COLONS.fullmatch(pred):
        return False
    bases = notation.in_base(gold), notation.in_base(pred)
    if bases[0] and bases[1]:
        return bases[0][0] == bases[1][0]
    kinds = notation.bracket_kind(gold), notation.bracket_kind(pred)
    if all(kinds) and kinds[0] != kinds[1]:
        return False
    return any(_same_values(one, other) for one in notation.readings(gold) for other in notation.readings(pred))


def _same_words(gold: str, pred: str) -> bool:
    first, second = notation.plain_words(gold), notation.plain_words(pred)
    if first == second:
        return True
    leading = re.match(r"\(([a-z])\)\s*\S", second)  # "(C) 12" against the option C
    return len(first) == 1 and leading is not None and leading.group(1) == first


def _same_values(gold: str, pred: str) -> bool:
    (gold, gold_percent), (pred, pred_percent) = notation.split_percent(gold), notation.split_percent(pred)
    gold = notation.strip_units(gold, bare=False)
    pred = notation.strip_units(pred, bare=notation.is_number(gold))
    if notation.compact(gold) == notation.compact(pred) and gold_percent == pred_percent:
        return True
    first, second = _parsed(gold), _parsed(pred)
    if first is None or second is None:
        return False
    if gold_percent == pred_percent:
        return _equal_parsed(first, second)
    bare, percent = (second, first) if gold_percent else (first, second)
    if not isinstance(bare, sympy.Expr) or not isinstance(percent, sympy.Expr):
        return False
    if _equal_parsed(percent / 100, bare):
        return True
    return bool(bare.is_number and abs(bare.evalf()) > 1) and _equal_parsed(percent, bare)


def _equal_parsed(gold: Any, pred: Any) -> bool:
    verdict = equality.same(gold, pred)
    if verdict is not None:
        return verdict
    if not getattr(gold, "free_symbols", True) and isinstance(gold, sympy.core.relational.Relational):
        return False  # math-verify takes any two equations without a solution for equal
    return bool(verify(gold, pred, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=False))


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """A sympy object, or None for what cannot be parsed, has no value (1:00), or would cost too much."""
    if len(text) > MAX_LENGTH or _depth(text) > MAX_DEPTH or _TWO_NUMBERS.search(text):
        return None  # of the last kind is "3 4", which the parser takes for a product
    found = parse(f"\\boxed{{{text}}}", _PARSING, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or found[0] in (sympy.zoo, sympy.nan):
        return None
    try:
        equality.check_cost(found[0])
    except equality.TooCostlyError:
        return None
    return equality.with_imaginary_unit(found[0])


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
