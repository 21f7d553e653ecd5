"""From a row's prompt to text: chat messages, checked, and the tokenizer's chat template."""

from collections.abc import Sequence
from typing import Any, Protocol

from hybridrl.config.schema import DataConfig
from hybridrl.data.errors import DataError

Message = dict[str, Any]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    unk_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...


def check_template(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raises DataError where `data.chat_template` and the tokenizer do not go together."""
    if config.chat_template and not tokenizer.chat_template:
        raise DataError(
            "data.chat_template=true, but the tokenizer has no chat template; set data.chat_template=false to tokenise "
            "the prompts as they are, or give a tokenizer that has one by model.tokenizer"
        )
    if not config.chat_template and config.system_prompt is not None:
        raise DataError("data.system_prompt needs data.chat_template=true; found false")


def messages_of(prompt: Any, config: DataConfig) -> list[Message]:
    """The messages of a prompt that is text or a list of messages, the system prompt first. Raises DataError."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("is empty")
        messages: list[Message] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        messages = [_message(index, message) for index, message in enumerate(prompt)]
        if not messages:
            raise DataError("is an empty list of messages")
    else:
        raise DataError(f"is {type(prompt).__name__}; expected text or a list of messages")
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError("has a system message of its own, and data.system_prompt is set; leave one of them out")
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _message(index: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"message {index} is {message!r:.80}; expected an object with role and content")
    if not isinstance(message.get("content"), str):
        raise DataError(
            f"message {index} ({message['role']}) has content {message.get('content')!r:.80}; expected text"
        )
    return message


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The text that the tokenizer's template makes of the messages. Raises DataError if the template refuses them."""
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise DataError(f"was refused by the chat template: {error}") from error
    return str(text)


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises DataError if the tokenizer has no token for a part of it, or ends it by itself."""
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise DataError(f"has characters that the tokenizer does not know: {text!r:.200}")
    if add_special_tokens and ids and ids[-1] == tokenizer.eos_token_id:
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not plain or plain[-1] != tokenizer.eos_token_id:
            raise DataError("is ended with the end-of-sequence token by the tokenizer; turn its add_eos_token off")
    return ids
