"""Prompts: rows rendered, tokenised once, and checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import Tokenizer, check_template, messages_of, render, token_ids
from hybridrl.data.errors import DataError
from hybridrl.data.rows import Row
from hybridrl.data.selection import select
from hybridrl.rollout.samples import Prompt

TASK_KEYS = ("question", "answer")
"""Keys of prompt and answer in the rows of a reasoning-gym task."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run, in the order of the rows; `id` is a prompt's place among them."""

    prompts: list[Prompt]
    dropped: int
    """Prompts that were left out for their length."""


def build_prompts(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, max_prompt_length: int) -> PromptSet:
    """Prompts of at most `max_prompt_length` tokens, as the engine gets them: the chat template's text counts.

    Longer ones are dropped and counted, or refused, by `data.overlong`. Raises DataError with all rows that lack a
    key, are empty, have no usable answer or are refused; and if nothing is left.
    """
    check_template(config, tokenizer)
    prompts, dropped = select(
        rows,
        lambda index, row: _prompt(index, row, config, tokenizer),
        what="prompt",
        limit=max_prompt_length,
        option="rollout.max_prompt_length",
        overlong=config.overlong,
    )
    return PromptSet(prompts, dropped)


def _prompt(index: int, row: Row, config: DataConfig, tokenizer: Tokenizer) -> Prompt:
    prompt_key, answer_key = keys(config)
    value = field_of(row, prompt_key, "data.prompt_key")
    text, ids = prompt_tokens(value, prompt_key, config, tokenizer)
    metadata = {key: value for key, value in row.fields.items() if key not in (prompt_key, answer_key)}
    return Prompt(id=index, token_ids=tuple(ids), text=text, answer=answer_of(row, config), metadata=metadata)


def keys(config: DataConfig) -> tuple[str, str]:
    """Keys of a row's prompt and answer."""
    return TASK_KEYS if config.source == "reasoning_gym" else (config.prompt_key, config.answer_key)


def prompt_tokens(value: Any, key: str, config: DataConfig, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Text and token ids of a prompt. Under a template its text has the special tokens, so none are added."""
    try:
        messages = messages_of(value, config)
        if config.chat_template:
            if messages[-1]["role"] == "assistant":
                raise DataError("ends with the assistant's own message; a prompt ends before it")
            text = render(tokenizer, messages, add_generation_prompt=True)
        elif isinstance(value, str):
            text = value
        else:
            raise DataError("is a list of messages, which needs data.chat_template=true")
        ids = token_ids(tokenizer, text, add_special_tokens=not config.chat_template)
        if not ids:
            raise DataError("has no tokens")
    except DataError as error:
        raise DataError(f"the prompt ({key!r}) {error}") from error
    return text, ids


def field_of(row: Row, key: str, option: str) -> Any:
    """A row's field. Raises DataError naming the keys that there are."""
    if key not in row.fields:
        raise DataError(f"has no {key!r} ({option}); found the keys {', '.join(map(repr, row.fields)) or 'none'}")
    return row.fields[key]


def answer_of(row: Row, config: DataConfig) -> str | None:
    """The reference answer as text; None where `data.answer_key` is empty, and for tasks that have no single answer.

    Numbers become text, whole ones without a decimal point (readers of tables turn 8 to 8.0).
    """
    _, key = keys(config)
    if not key:
        return None
    value = field_of(row, key, "data.answer_key, which may be '' if there are no answers")
    if value is None and config.source == "reasoning_gym":
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int):
        return str(value)
    raise DataError(f"the answer ({key!r}) is {value!r:.80} ({type(value).__name__}); expected text or a number")
