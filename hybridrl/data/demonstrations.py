"""Demonstrations for supervised training: token ids, and which of them are trained.

A demonstration is a prompt with its answer, or a conversation that ends with the assistant. What the assistant says is
trained, up to and with the token that ends its turn; everything else is context. The prompt's ids are the ones a
rollout would get, and each turn is tokenised by itself, as the turns of a rollout are: a template that changes earlier
turns when later ones come (one that drops old reasoning, say) does not fit that and is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import Tokenizer, check_template, messages_of, render, token_ids
from hybridrl.data.errors import DataError
from hybridrl.data.prompts import answer_of, field_of, keys, prompt_tokens
from hybridrl.data.rows import Row
from hybridrl.data.selection import select


@dataclass(frozen=True)
class Demonstration:
    """One example; `mask` is True for the tokens that are trained, and as long as `token_ids`."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class DemonstrationSet:
    """The demonstrations of a run, in the order of the rows."""

    demonstrations: list[Demonstration]
    dropped: int
    """Left out for their length."""


def build_demonstrations(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_length: int,
    stop_token_ids: Sequence[int] = (),
) -> DemonstrationSet:
    """Demonstrations of at most `max_length` tokens; longer ones by `data.overlong`.

    `stop_token_ids` are the ids that end a response beside the tokenizer's EOS. A turn that the template ends with none
    of them gets EOS. Raises DataError with all rows that cannot be used, and if nothing is left.
    """
    stops = stop_tokens(config, tokenizer, stop_token_ids)
    kept, dropped = select(
        rows,
        lambda _, row: demonstration(row, config, tokenizer, stops),
        what="demonstration",
        limit=max_length,
        option="rollout.max_prompt_length + rollout.max_response_length",
        overlong=config.overlong,
    )
    return DemonstrationSet(kept, dropped)


def stop_tokens(config: DataConfig, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> set[int]:
    """All ids that end a response. Raises DataError where the tokenizer has none, or does not fit the template."""
    check_template(config, tokenizer)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token; a response could never be taught to end")
    return {tokenizer.eos_token_id, *stop_token_ids}


def demonstration(row: Row, config: DataConfig, tokenizer: Tokenizer, stops: set[int]) -> Demonstration:
    """The demonstration that a row is; a turn ends with one of `stops`. Raises DataError if it cannot be used."""
    prompt_key, answer_key = keys(config)
    value = field_of(row, prompt_key, "data.prompt_key")
    is_conversation = isinstance(value, list) and bool(value) and _role(value[-1]) == "assistant"
    if is_conversation and config.chat_template:
        return _conversation(messages_of(value, config), tokenizer, stops)
    answer = answer_of(row, config)
    if answer is None or not answer:
        raise DataError(f"has no answer ({answer_key!r}) to train on, and its prompt is no conversation that holds one")
    if config.chat_template:
        messages = [*messages_of(value, config), {"role": "assistant", "content": answer}]
        return _conversation(messages, tokenizer, stops, last_only=True)
    _, prompt = prompt_tokens(value, prompt_key, config, tokenizer)
    return _joined([(prompt, False), ([*_turn(tokenizer, answer), int(tokenizer.eos_token_id or 0)], True)])


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _conversation(
    messages: list[dict[str, Any]], tokenizer: Tokenizer, stops: set[int], last_only: bool = False
) -> Demonstration:
    """Context and assistant turns alternately; each is what the template adds to the text so far."""
    pieces: list[tuple[list[int], bool]] = []
    done = ""
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        if message["role"] != "assistant" or (last_only and not last):
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True)
        after = render(tokenizer, messages[: index + 1], add_generation_prompt=False)
        context = _added(before, done, index)
        turn = _added(after, before, index)
        pieces.append((token_ids(tokenizer, context, add_special_tokens=False), False))
        spoken, rest = _split_turn(_turn(tokenizer, turn), stops, int(tokenizer.eos_token_id or 0))
        pieces.append((spoken, True))
        if not last:
            pieces.append((rest, False))
        done = after
    return _joined(pieces)


def _added(text: str, start: str, index: int) -> str:
    if not text.startswith(start):
        raise DataError(
            f"the chat template does not only append: message {index} changes the text before it, so that what was "
            f"trained is not what a rollout would see; found {text[: len(start)][-80:]!r} for {start[-80:]!r}; "
            "use a template that keeps earlier turns, or split the conversation into single turns"
        )
    return text[len(start) :]


def _turn(tokenizer: Tokenizer, text: str) -> list[int]:
    return token_ids(tokenizer, text, add_special_tokens=False)


def _split_turn(ids: list[int], stops: set[int], eos: int) -> tuple[list[int], list[int]]:
    """A turn up to and with its first stop token, and what the template puts after it."""
    for index, token in enumerate(ids):
        if token in stops:
            return ids[: index + 1], ids[index + 1 :]
    return [*ids, eos], []


def _joined(pieces: Sequence[tuple[list[int], bool]]) -> Demonstration:
    tokens = [token for ids, _ in pieces for token in ids]
    mask = [trained for ids, trained in pieces for _ in ids]
    return Demonstration(tuple(tokens), tuple(mask))
