"""Demonstrations: the assistant's words are trained and nothing else."""

from typing import Any

import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data.demonstrations import Demonstration, build_demonstrations
from hybridrl.data.errors import DataError
from hybridrl.data.prompts import build_prompts
from hybridrl.data.rows import Row
from tests.data.tokenizers import CHATML, FORGETFUL, PLAIN_END, character_tokenizer

CHAT = DataConfig()
PLAIN = DataConfig(chat_template=False)
TURNS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "x=2"},
    {"role": "user", "content": "and 2+2"},
    {"role": "assistant", "content": "x=4"},
]


def build(fields: dict[str, Any], config: DataConfig, tokenizer: Any, stops: tuple[int, ...] = ()) -> Demonstration:
    (made,) = build_demonstrations([Row("d:1", fields)], config, tokenizer, 200, stops).demonstrations
    assert len(made.token_ids) == len(made.mask)
    return made


def trained(tokenizer: Any, made: Demonstration) -> list[str]:
    """Each run of trained tokens, as text."""
    runs, previous = [], False
    for token, own in zip(made.token_ids, made.mask, strict=True):
        if own:
            runs = [*runs, []] if not previous else runs
            runs[-1].append(token)
        previous = own
    return [tokenizer.decode(run) for run in runs]


def test_plain_text() -> None:
    tokenizer = character_tokenizer(eos="<eos>")
    made = build({"prompt": "3+5=", "answer": 8}, PLAIN, tokenizer)
    assert tokenizer.decode(made.token_ids) == "3+5=8<eos>"
    assert made.mask == (False,) * 4 + (True,) * 2


def test_chat_trains_the_answer_up_to_the_end_of_its_turn_after_the_prompt_of_a_rollout() -> None:
    tokenizer = character_tokenizer(CHATML)
    row = {"prompt": "3+5", "answer": "8"}
    made = build(row, CHAT, tokenizer)
    assert trained(tokenizer, made) == ["8<|end|>"]
    (prompt,) = build_prompts([Row("d:1", row)], CHAT, tokenizer, 200).prompts
    assert made.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert made.mask.index(True) == len(prompt.token_ids)


def test_a_conversation_trains_every_assistant_turn() -> None:
    tokenizer = character_tokenizer(CHATML)
    made = build({"prompt": TURNS}, CHAT, tokenizer)
    assert trained(tokenizer, made) == ["x=2<|end|>", "x=4<|end|>"]
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(made.token_ids) == whole.removesuffix("\n")


def test_what_is_trained_is_what_the_template_marks_as_generated() -> None:
    """Token by token, by the tokenizer's own account of a template that says which part the assistant writes."""
    content = "{{ m.content }}<|end|>"
    marked = "{% if m.role == 'assistant' %}{% generation %}" + content + "{% endgeneration %}{% else %}" + content
    tokenizer = character_tokenizer(CHATML.replace(content, marked + "{% endif %}"))
    turns = [{"role": "system", "content": "add"}, *TURNS]
    made = build({"prompt": turns}, CHAT, tokenizer)
    told = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert list(made.token_ids) == told["input_ids"]
    assert [int(trained) for trained in made.mask] == told["assistant_masks"]
    assert sum(made.mask) == len("x=2") + len("x=4") + 2


def test_earlier_turns_of_a_prompt_with_an_answer_are_context() -> None:
    tokenizer = character_tokenizer(CHATML)
    made = build({"prompt": TURNS[:3], "answer": "x=4"}, CHAT, tokenizer)
    assert trained(tokenizer, made) == ["x=4<|end|>"]


def test_a_turn_that_no_stop_token_ends_gets_eos() -> None:
    tokenizer = character_tokenizer(PLAIN_END, eos="<eos>")
    assert trained(tokenizer, build({"prompt": "hi", "answer": "yo"}, CHAT, tokenizer)) == ["yo\n<eos>"]


def test_other_stop_tokens_end_a_turn() -> None:
    tokenizer = character_tokenizer(CHATML, eos="<eos>")
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    assert trained(tokenizer, build({"prompt": "hi", "answer": "yo"}, CHAT, tokenizer, (stop,))) == ["yo<|end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = character_tokenizer(FORGETFUL)
    with pytest.raises(DataError, match="d:1: the chat template does not only append: message 3"):
        build({"prompt": TURNS}, CHAT, tokenizer)
    assert trained(tokenizer, build({"prompt": TURNS[:2]}, CHAT, tokenizer)) == ["x=2<|end|>"]


def test_too_long_ones_are_dropped_or_refused() -> None:
    tokenizer = character_tokenizer(eos="<eos>")
    data = [Row("d:1", {"prompt": "1", "answer": "2"}), Row("d:2", {"prompt": "12", "answer": "3"})]
    made = build_demonstrations(data, PLAIN, tokenizer, 3)
    assert (len(made.demonstrations), made.dropped) == (1, 1)
    with pytest.raises(DataError, match=r"d:2: the demonstration has 4 tokens, over rollout\.max_.*=3;"):
        build_demonstrations(data, DataConfig(chat_template=False, overlong="error"), tokenizer, 3)
    with pytest.raises(DataError, match=r"all 2 are over .*=2 tokens"):
        build_demonstrations(data, PLAIN, tokenizer, 2)


@pytest.mark.parametrize(
    ("fields", "config", "message"),
    [
        ({"prompt": "hi"}, CHAT, "has no 'answer'"),
        ({"prompt": "hi", "answer": ""}, CHAT, "has no answer"),
        ({"prompt": "hi"}, DataConfig(answer_key=""), "has no answer"),
        ({"prompt": [], "answer": "x"}, CHAT, "empty list"),
    ],
)
def test_rows_without_anything_to_train_on_are_named(fields: dict[str, Any], config: DataConfig, message: str) -> None:
    with pytest.raises(DataError, match=f"d:1: .*{message}"):
        build(fields, config, character_tokenizer(CHATML))
