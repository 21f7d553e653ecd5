"""Stop strings: where a response ends by its text. One rule for every engine.

A response ends with the first token after which its text holds one of the strings. The text is that of the response
alone, special tokens included: a string that begins in the prompt is not found. Tokens are never cut or encoded anew:
the stop string's own tokens stay, and so does what else the last token says. Log-probs, versions and masks are those
of the kept tokens. The response is finished by `Finish.STOP`, also where the token is the last that was allowed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.rollout.samples import Finish, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens included."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How text ends whose last character lacks bytes that the next tokens may bring."""
_PATIENCE = 64  # tokens; only bytes that are no text end in an unfinished character for so long


def decoder(folder: Path | str) -> Decode:
    """The decoding of the folder's tokenizer."""
    from transformers import AutoTokenizer

    return decoding(AutoTokenizer.from_pretrained(folder))


def decoding(tokenizer: Any) -> Decode:
    """A Hugging Face tokenizer's decoding, which leaves nothing out and tidies nothing."""
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopStrings:
    """Watches one response for any of some strings, token by token.

    The text grows by what each token adds to it. Few tokens are decoded at a time: those since the last whole character
    and those before them that they may depend on (a space that a tokenizer leaves out at the start of a text).
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        """Where the tokens begin that are decoded again."""
        self._settled = 0
        """Tokens whose text is in `_tail`, or before it."""
        self._tail = ""
        """The end of the text: what a stop string may have begun in."""

    def append(self, token: int) -> bool:
        """Takes the response's next token; whether the response ends with it."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._settled])
        after = self._decode(self._tokens[self._context :])
        text = self._tail + after[len(before) :]
        if any(stop in text for stop in self._stops):
            return True
        if not after.endswith(UNFINISHED) or len(self._tokens) - self._settled >= _PATIENCE:
            self._context, self._settled = self._settled, len(self._tokens)
            self._tail = text[-max(map(len, self._stops)) :]
        return False


class Ending:
    """When one response ends: by a stop token, by a stop string, or at `limit` tokens.

    Raises ValueError where the parameters name stop strings and there is nothing to decode by.
    """

    def __init__(self, params: SamplingParams, limit: int, decode: Decode | None) -> None:
        if params.stop and decode is None:
            raise ValueError(f"stop strings {list(params.stop)} need the engine to have a tokenizer")
        self._ids = frozenset(params.stop_token_ids)
        self._strings = StopStrings(params.stop, decode) if params.stop and decode is not None else None
        self._left = limit

    def append(self, token: int) -> Finish | None:
        """Takes the response's next token; why the response ends with it, or None if it does not."""
        self._left -= 1
        by_text = self._strings is not None and self._strings.append(token)
        if by_text or token in self._ids:
            return Finish.STOP
        return Finish.LENGTH if self._left <= 0 else None
