r"""Notation of mathematical answers: one way to write what has several, before anything is parsed.

The rules, each for a whole answer (the inside of a box):

- dollar signs, currency, spacing commands, a final full stop and typographic variants (`−`, `×`, `½`, `dfrac`) go;
- thousands separators `1,234`, `1{,}234`, `1\,234`, `1\ 234`, `1 234` go, between groups of three digits outside
  brackets; a comma is otherwise a list, and `1,234` may also be one (`readings` gives both);
- a repeating decimal `0.1\overline{6}` is the fraction that it writes;
- units go: `\text{ cm}`, `\mathrm{cm}^2`, `^\circ`, and plain words where the reference is a bare number;
- `50\%` is read as 1/2 and, where the other side is larger than 1, also as 50 (the sign as a unit).
"""

import re

_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ",    "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "°": r"^\circ ", "∅": r"\emptyset ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "²": "^{2}", "³": "^{3}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "％": "%",
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9a-zA-Z]+))")
_TEXT = r"\\(?:text(?:normal|bf|it|rm|sf)?|mathrm|mathbf|mbox|hbox|operatorname)"
_LEAD = re.compile(rf"^{_TEXT}\s*\{{[^{{}}]*\b(?:is|are|is:|are:|answer:)\s*\}}\s*(?=\S)")
_WHOLE_TEXT = re.compile(rf"^{_TEXT}\s*\{{([^{{}}]*)\}}$")
_TEXT_UNIT = re.compile(rf"(?<=[0-9}})a-z])\s*{_TEXT}\s*\{{\s*[^{{}}]*\}}\s*(?:\^\s*(?:\{{-?[0-9]\}}|[0-9]))?$")
_WORD_UNIT = re.compile(
    r"(?<=[0-9}])\s*(?!\s*(?:or|and|to|pm|choose)\b)[A-Za-z]{2,}[A-Za-z/ .^0-9]*$|(?<=[0-9}])\s+[mgshlLJNWVKCFt]$"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad\b")  # not the second stroke of a matrix's row break
_GROUPS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9,])")
_SPACED = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:(?:\\[,;:!]|\\ |~|\{,\}|,\\!|\s)[0-9]{3})+)(?![0-9,])")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]+)(?![\w.])")
_POWER = re.compile(r"\^\s*\(?(-?[0-9]{2,}|-[0-9])\)?(?![0-9])")
_REPEATING = re.compile(r"([0-9]{0,50})\.([0-9]{0,50})\\(?:overline|bar|dot)\s*(?:\{([0-9]{1,50})\}|([0-9]))")
_MIXED = re.compile(r"^(-?)([0-9]+)\s+([0-9]+)/([0-9]+)$")
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\s*\{)?\s*(?:percent|per cent|pct)\s*\}?)$", re.IGNORECASE)
_WORDS = frozenset({"yes", "no", "true", "false", "odd", "even", "none", "both", "neither"})


def clean(text: str) -> str:
    """The answer with its typography settled; commas between digits are left as they are."""
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m.group(1) or m.group(2)}}}", text.translate(_TRANSLATION))
    text = re.sub(r"\\[$]|[$€£¥₹]|\\displaystyle|\\limits\b", "", text)
    text = re.sub(r"\\([dtc])(?=frac|binom)", r"\\", text).replace(r"\varnothing", r"\emptyset")
    text = _SPACED.sub(lambda m: m.group(1) + re.sub(r"[^0-9]", "", m.group(2)), text)
    text = _SPACING.sub(" ", text).replace("{,}", ",").replace(r"\left", "").replace(r"\right", "")
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?:\\\\|[.,;:?])+$", "", text).strip()
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = _POWER.sub(r"^{\1}", text)
    text = _LEAD.sub("", text)
    return _MIXED.sub(r"\1(\2+\\frac{\3}{\4})", text)


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction (16 - 1) / 90."""
    before, period = f"{match.group(1)}{match.group(2)}", match.group(3) or match.group(4)
    top = int(before + period) - int(before or "0")
    return rf"\frac{{{top}}}{{{10 ** len(match.group(2)) * (10 ** len(period) - 1)}}}"


def readings(text: str) -> list[str]:
    """A cleaned answer with its commas between groups of three digits as separators, then as they stand."""
    joined = _join_groups(text)
    return [joined] if joined == text else [joined, text]


def _join_groups(text: str) -> str:
    """Drops separators outside brackets: in (1,234) the comma is a list's."""
    pieces = []
    for index, piece in enumerate(re.split(r"(\\\{.*\\\}|[(\[].*[)\]])", text)):
        outside = index % 2 == 0
        pieces.append(_GROUPS.sub(lambda m: m.group(1) + m.group(2).replace(",", ""), piece) if outside else piece)
    return "".join(pieces)


def plain_words(text: str) -> str:
    r"""A worded answer to compare as text: no `\text{}`, brackets round it, full stop, case or surplus blanks."""
    previous = None
    while previous != text:
        previous = text
        text = re.sub(rf"{_TEXT}\s*\{{([^{{}}]*)\}}", r"\1", text.strip().rstrip(".")).strip()
        if re.fullmatch(r"\([^()]*\)", text):
            text = text[1:-1]
    return " ".join(text.split()).casefold()


def is_worded(text: str) -> bool:
    r"""Whether an answer is words rather than a formula: whole in `\text{}`, or letters that spell a word.

    `abc` is a product of three variables; four letters and more, several words, and yes, no, odd, … are words.
    """
    if _WHOLE_TEXT.match(text):
        return True
    words = text.split()
    letters = all(re.fullmatch(r"[A-Za-z'-]+", word) for word in words)
    return bool(words) and letters and (max(map(len, words)) >= 4 or text.casefold() in _WORDS)


def is_number(text: str) -> bool:
    """Whether a cleaned answer is one number or a fraction of numbers, with nothing else."""
    return re.fullmatch(r"[-+]?(?:[0-9.]+(?:\s*/\s*[0-9.]+)?|\\frac\{-?[0-9]+\}\{[0-9]+\})", text) is not None


def strip_units(text: str, bare: bool) -> str:
    """Without a unit at the end; plain words count as one only where the reference is a `bare` number."""
    text = re.sub(r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?\s*[CF]?$|\\degree$", "", text)
    text = _TEXT_UNIT.sub("", _WHOLE_TEXT.sub(r"\1", text) if bare else text).strip()
    return _WORD_UNIT.sub("", text).strip() if bare else text


def split_percent(text: str) -> tuple[str, bool]:
    """The answer without its percent sign, and whether it had one."""
    stripped = _PERCENT.sub("", text)
    return (stripped, True) if stripped and stripped != text else (text, False)


def in_base(text: str) -> tuple[int, int] | None:
    """Value and base of an integer that is written with one, as `1011_2`; None for anything else."""
    match = re.fullmatch(r"(-?[0-9]{1,200})\s*_\s*\{?\s*([0-9]{1,2})\s*\}?", text)
    if match is None or not 2 <= (base := int(match.group(2))) <= 10:
        return None
    if any(int(digit) >= base for digit in match.group(1).lstrip("-")):
        return None
    return int(match.group(1), base), base


def compact(text: str) -> str:
    """The answer without text commands, and without blanks but those between digits, to compare letter by letter."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", re.sub(rf"{_TEXT}\s*\{{([^{{}}]*)\}}", r"\1", text))


def bracket_kind(text: str) -> str:
    """The brackets round a whole list, as `()`, `[)` or `{}`; empty if none, or if they hold no comma."""
    inner = text.replace(r"\{", "{").replace(r"\}", "}").replace(r"\lbrace", "{").replace(r"\rbrace", "}").strip()
    if len(inner) < 2 or inner[0] not in "([{" or inner[-1] not in ")]}" or "," not in inner:
        return ""
    depth = 0
    for index, character in enumerate(inner):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and index < len(inner) - 1:
            return ""
    return inner[0] + inner[-1]
