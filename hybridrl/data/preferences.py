"""Preferences: two responses to a prompt of which one is better, or one response with a label.

Prompt and response become token ids exactly as those of a demonstration (`hybridrl.data.demonstrations`): the prompt is
the one that a rollout would get, and the response ends with the token that ends its turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import Tokenizer
from hybridrl.data.demonstrations import Demonstration, demonstration, stop_tokens
from hybridrl.data.errors import DataError
from hybridrl.data.prompts import field_of, keys
from hybridrl.data.rows import Row
from hybridrl.data.selection import select


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0
    """By how much the chosen one is better, on a reward model's scale."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the longer sequence, for limits of length."""
        return max(self.chosen.token_ids, self.rejected.token_ids, key=len)


@dataclass(frozen=True)
class Verdict:
    """A response that was judged good or bad."""

    response: Demonstration
    desirable: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.response.token_ids

    def answered_by(self, other: "Verdict") -> Demonstration:
        """This one's prompt with the other's response, of which neither was made for the other."""
        ours, theirs = self.response, other.response
        prompt, start = ours.mask.index(True), theirs.mask.index(True)
        return Demonstration(
            ours.token_ids[:prompt] + theirs.token_ids[start:], ours.mask[:prompt] + theirs.mask[start:]
        )


Made = TypeVar("Made", Pair, Verdict)


@dataclass(frozen=True)
class PreferenceSet(Generic[Made]):
    """The preferences of a run, in the order of the rows."""

    examples: list[Made]
    dropped: int
    """Left out for their length."""


def build_pairs(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, max_length: int, stop_token_ids: Sequence[int] = ()
) -> PreferenceSet[Pair]:
    """Pairs whose sequences have at most `max_length` tokens each; longer ones by `data.overlong`.

    Raises DataError with all rows that cannot be used, and if nothing is left.
    """
    stops = stop_tokens(config, tokenizer, stop_token_ids)

    def make(_: int, row: Row) -> Pair:
        chosen, rejected = (
            demonstration(_answered(row, config, key, option), config, tokenizer, stops)
            for key, option in ((config.chosen_key, "data.chosen_key"), (config.rejected_key, "data.rejected_key"))
        )
        if chosen == rejected:
            raise DataError(f"has the same response under {config.chosen_key!r} and {config.rejected_key!r}")
        return Pair(chosen, rejected, _margin(row, config))

    return PreferenceSet(*_select(rows, make, "pair", max_length, config))


def build_verdicts(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, max_length: int, stop_token_ids: Sequence[int] = ()
) -> PreferenceSet[Verdict]:
    """Labelled responses, else as `build_pairs`. Raises DataError also where all labels are alike."""
    stops = stop_tokens(config, tokenizer, stop_token_ids)

    def make(_: int, row: Row) -> Verdict:
        label = field_of(row, config.label_key, "data.label_key")
        if not isinstance(label, bool):
            raise DataError(f"the label ({config.label_key!r}) is {label!r:.80}; expected true or false")
        answered = _answered(row, config, config.completion_key, "data.completion_key")
        return Verdict(demonstration(answered, config, tokenizer, stops), label)

    found = PreferenceSet(*_select(rows, make, "response", max_length, config))
    if len({verdict.desirable for verdict in found.examples}) == 1:
        raise DataError(f"every label ({config.label_key!r}) is {found.examples[0].desirable}; expected some of each")
    return found


def _select(rows: Sequence[Row], make: Any, what: str, max_length: int, config: DataConfig) -> tuple[list[Any], int]:
    option = "rollout.max_prompt_length + rollout.max_response_length"
    return select(rows, make, what=what, limit=max_length, option=option, overlong=config.overlong)


def _answered(row: Row, config: DataConfig, key: str, option: str) -> Row:
    """The row with this response as its answer."""
    response = field_of(row, key, option)
    if not isinstance(response, str):
        raise DataError(f"the response ({key!r}) is {response!r:.80}; expected text")
    prompt_key, answer_key = keys(config)
    fields = {name: value for name, value in row.fields.items() if name == prompt_key}
    return replace(row, fields={**fields, answer_key: response})


def _margin(row: Row, config: DataConfig) -> float:
    if config.margin_key is None:
        return 0.0
    margin = field_of(row, config.margin_key, "data.margin_key")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin) or margin < 0:
        raise DataError(f"the margin ({config.margin_key!r}) is {margin!r:.80}; expected a number of at least 0")
    return float(margin)
