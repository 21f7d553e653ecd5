"""`exact`: the whole response is the reference answer, up to white space, case and a full stop at the end."""

import unicodedata
from collections.abc import Mapping
from typing import Any


def normalize(text: str, case_sensitive: bool = False) -> str:
    """Unicode NFC, runs of white space as one blank, none at the ends, without one final full stop, case folded."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    text = text.removesuffix(".").rstrip()
    return text if case_sensitive else text.casefold()


def exact(
    response: str, answer: str | None, metadata: Mapping[str, Any], *, case_sensitive: bool = False
) -> float | None:
    """1.0 if response and answer are equal after `normalize`, else 0.0; None without an answer."""
    if answer is None or not (expected := normalize(answer, case_sensitive)):
        return None
    return float(normalize(response, case_sensitive) == expected)
