r"""Where a response states its final answer.

1. The last box counts: `\boxed{…}`, `\fbox{…}`, `\framebox{…}`, or `\boxed` followed by one number, word or command.
   A last box that is never closed, or is empty, is no answer, whatever earlier boxes held.
2. Without any box, what follows the last "answer is", "answer:" or `####` on its line.
3. Else the last formula between dollar signs, `\( \)` or `\[ \]`; else the last number.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_ANCHOR = re.compile(r"(?:answer\s*(?:is\s*:?|:)|####)[*_\s]*", re.IGNORECASE)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>.+?)\$\$|(?<![\\$])\$(?P<b>(?:\\\$|[^$\n])+?)(?<!\\)\$|\\\[(?P<c>.+?)\\\]|\\\((?P<d>.+?)\\\)",
    re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?[$€£]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?(?:\\?%)?")
_BARE = re.compile(r"\\[a-zA-Z]+|[^\s$\\{}]+")
_MAX_TAIL = 20_000
"""Characters at the end of a response that are searched for an unboxed answer."""


def final_answer(text: str) -> str | None:
    """The text of the final answer, by the rules of the module; None if there is none."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _content(text, boxes[-1].end())
    return _unboxed(text[-_MAX_TAIL:])


def _content(text: str, start: int) -> str | None:
    if text[start : start + 1] == "{":
        end = closing_brace(text, start)
        return (text[start + 1 : end].strip() or None) if end is not None else None
    match = _BARE.match(text, start)
    if match is None:
        return None
    end = match.end()
    while match.group().startswith("\\") and text[end : end + 1] == "{":  # the command's arguments
        closed = closing_brace(text, end)
        if closed is None:
            return None
        end = closed + 1
    return text[start:end].rstrip(".,;:!?") or None


def closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes the one at `start`; `\{` and `\}` are not counted. None if it stays open."""
    depth = 0
    index = start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return None


def _unboxed(text: str) -> str | None:
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        line = text[anchors[-1].end() :].split("\n", 1)[0]
        if (formula := _FORMULA.match(line.lstrip(" *"))) is not None:
            return _formula(formula)
        if line.strip():
            return _first_phrase(line)
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _formula(formulas[-1])
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def _formula(match: re.Match[str]) -> str | None:
    return next(group for group in match.groups() if group is not None).strip() or None


def _first_phrase(line: str) -> str | None:
    """Up to the end of the sentence; a point between digits ends none."""
    sentence = re.split(r"[.!?;](?:\s|$)|\*\*", line.strip(), maxsplit=1)[0]
    return sentence.strip() or None
