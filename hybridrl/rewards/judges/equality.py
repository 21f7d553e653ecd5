"""Exact equality of parsed answers, and the bound on what it may cost.

math-verify compares numbers through absolute rounding (six decimals, or a difference that is chopped to 0), so that
1/2004! equals 1/2006! and 0.0000001 equals 0.0000002. Here decimals are the rational numbers they write, rational
numbers are compared exactly, other numbers to 80 significant digits, and expressions with variables at several points.
"""

import math
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy import Basic, Eq, Expr, FiniteSet, Float, Integer, Interval, MatrixBase, Rational, Symbol, Tuple

MAX_LOG10 = 20_000.0
"""Numbers of more decimal digits are not computed."""
MAX_NODES = 400
MAX_TERMS = 2_000
"""Of a sum or product."""
_DIGITS = 100
_RELATIVE = Float("1e-80", _DIGITS)
_POINTS = tuple(Rational(n, 997) for n in (1373, -743, 2441, 389, -1777))


class TooCostlyError(ValueError):
    """An answer whose value would take too long to compute."""


def check_cost(value: Any) -> None:
    """Raises TooCostlyError for power towers, huge factorials, long sums and big trees, without computing them."""
    if isinstance(value, MatrixBase):
        for element in value.flat():
            check_cost(element)
        return
    if not isinstance(value, Basic):
        return
    if sum(1 for _ in zip(sympy.preorder_traversal(value), range(MAX_NODES + 1), strict=False)) > MAX_NODES:
        raise TooCostlyError(f"more than {MAX_NODES} terms")
    _log10(value)


def _log10(node: Any) -> float:
    """An upper estimate of log10 |node|; variables count as 10. Raises TooCostlyError beyond MAX_LOG10."""
    if isinstance(node, Rational):
        size = max(abs(int(node.p)).bit_length(), int(node.q).bit_length()) * math.log10(2)
    elif isinstance(node, Float):
        size = abs(float(sympy.log(abs(node), 10))) if node else 0.0
    else:
        inner = [_log10(argument) for argument in getattr(node, "args", ())]
        size = _combined(node, inner)
    if size > MAX_LOG10:
        raise TooCostlyError("a number of too many digits")
    return size


def _combined(node: Any, inner: list[float]) -> float:
    if not inner:
        return 1.0
    if isinstance(node, (sympy.Pow, sympy.exp)):
        base, exponent = (inner[0], inner[1]) if len(inner) == 2 else (1.0, inner[0])
        return max(base, 1.0) * 10.0 ** min(exponent, 18.0)
    if isinstance(node, (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.binomial)):
        largest = 10.0 ** min(max(inner), 18.0)
        return largest * max(math.log10(largest), 1.0)
    if isinstance(node, (sympy.Sum, sympy.Product)):
        if 10.0 ** min(max(inner[1:]), 18.0) > MAX_TERMS and not _infinite(node):
            raise TooCostlyError(f"more than {MAX_TERMS} terms of a sum or product")
        return inner[0] + max(inner[1:])
    return sum(inner) if isinstance(node, sympy.Mul) else max(inner) + math.log10(len(inner) + 1)


def _infinite(node: Any) -> bool:
    return any(limit.has(sympy.oo, -sympy.oo) for limit in node.limits)


def with_imaginary_unit(value: Any) -> Any:
    """The answer with its free variable i as the imaginary unit: math-verify's parser keeps it a variable."""
    if not isinstance(value, Expr):
        return value
    return value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})


def same(gold: Any, pred: Any) -> bool | None:
    """Whether two parsed answers are the same; None where this module has no exact rule for their kinds.

    Sets are compared without order, tuples, intervals and matrices with it. `x = 5` against `5` compares the values.
    """
    if isinstance(gold, Eq) and isinstance(pred, Eq):
        return same(gold.rhs, pred.rhs) if gold.lhs == pred.lhs and isinstance(gold.lhs, Symbol) else None
    if isinstance(pred, Eq) and not isinstance(gold, sympy.core.relational.Relational):
        return same(gold, pred.rhs) if isinstance(pred.lhs, Symbol) else None
    if isinstance(gold, Eq) and not isinstance(pred, sympy.core.relational.Relational):
        return same(gold.rhs, pred) if isinstance(gold.lhs, Symbol) else None
    if isinstance(gold, FiniteSet) and isinstance(pred, FiniteSet):
        return _same_sets(gold.args, pred.args)
    if isinstance(gold, Tuple) and isinstance(pred, Tuple):
        return len(gold) == len(pred) and _every(zip(gold, pred, strict=True))
    if isinstance(gold, Interval) and isinstance(pred, Interval):
        ends = (gold.left_open, gold.right_open) == (pred.left_open, pred.right_open)
        return ends and _every([(gold.start, pred.start), (gold.end, pred.end)])
    if isinstance(gold, MatrixBase) and isinstance(pred, MatrixBase):
        return gold.shape == pred.shape and _every(zip(gold.flat(), pred.flat(), strict=True))
    if isinstance(gold, Expr) and isinstance(pred, Expr):
        return _same_expressions(gold, pred)
    return None


def _every(pairs: Iterable[tuple[Any, Any]]) -> bool | None:
    verdicts = [same(gold, pred) for gold, pred in pairs]
    return False if False in verdicts else None if None in verdicts else True


def _same_sets(gold: tuple[Any, ...], pred: tuple[Any, ...]) -> bool | None:
    if len(gold) != len(pred):
        return False
    rest = list(pred)
    for element in gold:
        verdicts = [same(element, other) for other in rest]
        if True not in verdicts:
            return None if None in verdicts else False
        del rest[verdicts.index(True)]
    return True


def _same_expressions(gold: Expr, pred: Expr) -> bool | None:
    gold, pred = _exact(gold), _exact(pred)
    symbols = sorted(gold.free_symbols | pred.free_symbols, key=str)
    if gold.has(sympy.nan, sympy.zoo) or pred.has(sympy.nan, sympy.zoo):
        return None
    if not symbols:
        return _same_numbers(gold, pred)
    verdicts = []
    for shift in range(len(_POINTS)):
        point = {symbol: _POINTS[(shift + i) % len(_POINTS)] + i // 5 for i, symbol in enumerate(symbols)}
        verdict = _same_numbers(gold.subs(point), pred.subs(point))
        if verdict is False:
            return False
        verdicts.append(verdict)
    return True if verdicts.count(True) >= 3 else None


def _exact(value: Expr) -> Expr:
    """Decimals as the fractions that they write."""
    floats = {number: Rational(str(number)) for number in value.atoms(Float)}
    return value.xreplace(floats) if floats else value


def _same_numbers(gold: Expr, pred: Expr) -> bool | None:
    gold, pred = gold.doit(), pred.doit()
    if isinstance(gold, (Rational, Integer)) and isinstance(pred, (Rational, Integer)):
        return bool(gold == pred)
    if gold == pred:
        return True
    if sympy.oo in (abs(gold), abs(pred)):
        return False
    first, second = sympy.N(gold, _DIGITS), sympy.N(pred, _DIGITS)
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return None
    scale = max(abs(first), abs(second))
    if not scale.is_Float and not scale.is_Rational:
        return None
    return bool(scale == 0 or abs(first - second) <= scale * _RELATIVE)
