r"""`numeric`: the response's final number equals the reference number, exactly.

The final number is the first one after the last `####` (however much text follows it), or without a `####` the last one
of the text. A number may carry a sign, currency signs before it, units or a full stop after it, thousands separators
(`1,234`, `1{,}234`, `1\,234`, `1\ 234`, a thin or no-break space), a decimal point, an exponent (`1.5e3`,
`1.5 \times 10^{3}`), or be a fraction of two integers (`3/4`, `\frac{3}{4}`). Separators count only between groups of
three digits, so `1,2` is two numbers. Currency, units and percent signs are not compared: `50%` is 50.
Equality is that of rational numbers: 18.9 equals 18.90, and 0.333 is not 1/3.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

MAX_DIGITS = 400
"""Longer numbers and larger exponents are no answers; their exact value could take any time and memory."""

_SPACE = "\u00a0\u2009\u202f"
_SEPARATOR = rf"(?:,|\{{,\}}|,\\!|\\,|\\;|\\:|\\!|\\ |~|[{_SPACE}])"
_PLAIN = rf"(?:[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?!{_SEPARATOR}?[0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    # A minus sign after a digit, a letter or a closing bracket is an operator: 10-3 ends in 3.
    r"(?P<sign>(?<![\w)\]}])[-+])?\s*(?:\\?[$€£¥₹]\s*(?P<inner>[-+])?)?"
    rf"(?:\\[dtc]?frac\s*\{{(?P<top>[-+]?[0-9]+)\}}\s*\{{(?P<bottom>[0-9]+)\}}"
    rf"|(?P<plain>{_PLAIN})"
    r"(?:[eE](?P<exponent>[-+]?[0-9]+)(?![\w.])"
    r"|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*\{?(?P<power>[-+]?[0-9]+)\}?"
    r"|\s*/\s*(?P<divisor>[0-9]+)(?![0-9.]))?)"
)


def numeric(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float | None:
    """1.0 if the final numbers of response and answer are equal, else 0.0; None if the answer holds no number."""
    expected = None if answer is None else final_number(answer)
    if expected is None:
        return None
    return float(final_number(response) == expected)


def final_number(text: str) -> Fraction | None:
    """The final number of a text (see the module), None if there is none."""
    text = text.replace("\u2212", "-")
    _, marker, tail = text.rpartition("####")
    if marker:
        found = _NUMBER.search(tail)
    else:
        found = None
        for match in _NUMBER.finditer(text):
            found = match
    return None if found is None else _value(found)


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom, plain, exponent, power, divisor = match.group("top", "bottom", "plain", "exponent", "power", "divisor")
    scale = exponent or power or "0"
    if len(match.group()) > MAX_DIGITS or len(scale) > 5 or abs(int(scale)) > MAX_DIGITS:
        return None
    below = int(bottom or divisor or 1)
    if below == 0:
        return None
    value = Fraction(top if top is not None else re.sub(_SEPARATOR, "", plain)) * Fraction(10) ** int(scale) / below
    signs = (match.group("sign") or "") + (match.group("inner") or "")
    return -value if signs.count("-") % 2 else value
