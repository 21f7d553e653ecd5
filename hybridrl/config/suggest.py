"""Did-you-mean, for keys and for names."""

from collections.abc import Collection
from difflib import get_close_matches


def closest(word: str, known: Collection[str]) -> str | None:
    """The known word that looks most like `word`, or None where none looks like it."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return matches[0] if matches else None


def elsewhere(key: str, known: Collection[str]) -> list[str]:
    """Dotted keys that end as `key` does, in other sections."""
    leaf = key.rpartition(".")[2]
    return [k for k in known if k.rpartition(".")[2] == leaf]


def hint(word: str, known: Collection[str]) -> str:
    """`did you mean 'x'?` where something is close, else the list of all that is known."""
    match = closest(word, known)
    return f"did you mean '{match}'?" if match else "known: " + (", ".join(sorted(known)) or "none")
