"""Rows to prompts: templates, lengths, answers, errors."""

from typing import Any

import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data.errors import DataError
from hybridrl.data.prompts import build_prompts
from hybridrl.data.rows import Row
from tests.data.tokenizers import CHATML, STRICT, character_tokenizer


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [Row(f"data.jsonl:{number}", row) for number, row in enumerate(fields, 1)]


PLAIN = DataConfig(chat_template=False)
CHAT = DataConfig()


def test_plain_text_is_tokenised_as_it_is() -> None:
    tokenizer = character_tokenizer()
    made = build_prompts(rows({"prompt": "3+5=", "answer": 8, "level": 2}), PLAIN, tokenizer, 10)
    (prompt,) = made.prompts
    assert tokenizer.decode(prompt.token_ids) == prompt.text == "3+5="
    assert (prompt.id, prompt.answer, prompt.metadata, made.dropped) == (0, "8", {"level": 2}, 0)


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_the_template_is_rendered_once_and_ends_with_the_generation_prompt(prompt: Any) -> None:
    tokenizer = character_tokenizer(CHATML)
    (made,) = build_prompts(rows({"prompt": prompt, "answer": "x"}), CHAT, tokenizer, 100).prompts
    assert made.text == "<|start|>user:hi<|end|>\n<|start|>assistant:"
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert list(made.token_ids) == list(expected)


def test_a_system_prompt_comes_first() -> None:
    config = DataConfig(system_prompt="be kind")
    (made,) = build_prompts(rows({"prompt": "hi", "answer": "x"}), config, character_tokenizer(CHATML), 100).prompts
    assert made.text.startswith("<|start|>system:be kind<|end|>\n<|start|>user:hi")


def test_the_length_is_that_of_the_rendered_text() -> None:
    tokenizer = character_tokenizer(CHATML)
    data = rows({"prompt": "hi", "answer": "x"}, {"prompt": "hi!".replace("!", "."), "answer": "x"})
    limit = len(build_prompts(data[:1], CHAT, tokenizer, 100).prompts[0].token_ids)
    made = build_prompts(data, CHAT, tokenizer, limit)
    assert (len(made.prompts), made.dropped) == (1, 1)
    with pytest.raises(DataError, match=rf"data.jsonl:2: the prompt has {limit + 1} tokens, over .*={limit}"):
        build_prompts(data, DataConfig(overlong="error"), tokenizer, limit)
    with pytest.raises(DataError, match="all 2 are over"):
        build_prompts(data, CHAT, tokenizer, limit - 1)
    with pytest.raises(DataError, match="expected 'drop' or 'error'"):
        build_prompts(data, DataConfig(overlong="left"), tokenizer, limit)


def test_ids_stay_dense_when_prompts_are_dropped() -> None:
    data = rows({"prompt": "12345", "answer": "x"}, {"prompt": "1", "answer": "a"}, {"prompt": "2", "answer": "b"})
    made = build_prompts(data, PLAIN, character_tokenizer(), 3).prompts
    assert [(prompt.id, prompt.answer) for prompt in made] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(8, "8"), (8.0, "8"), (0.5, "0.5"), ("8", "8"), (True, "True"), (-3, "-3"), (10**30, "1" + "0" * 30)],
)
def test_answers_become_text(answer: Any, text: str) -> None:
    (made,) = build_prompts(rows({"prompt": "1", "answer": answer}), PLAIN, character_tokenizer(), 9).prompts
    assert made.answer == text


def test_answers_may_be_left_out_on_purpose_only() -> None:
    config = DataConfig(chat_template=False, answer_key="")
    (made,) = build_prompts(rows({"prompt": "1"}), config, character_tokenizer(), 9).prompts
    assert made.answer is None
    with pytest.raises(DataError, match="may be ''"):
        build_prompts(rows({"prompt": "1"}), PLAIN, character_tokenizer(), 9)


def test_reasoning_gym_rows_have_keys_of_their_own() -> None:
    config = DataConfig(source="reasoning_gym", chat_template=False, prompt_key="text", answer_key="label")
    row = {"question": "1+1", "answer": None, "reasoning_gym": {"task": "t"}}
    (made,) = build_prompts(rows(row), config, character_tokenizer(), 9).prompts
    assert (made.text, made.answer, made.metadata) == ("1+1", None, {"reasoning_gym": {"task": "t"}})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1", "answer": "2"}, r"has no 'prompt' \(data.prompt_key\); found the keys 'question', 'answer'"),
        ({"prompt": "1", "label": "2"}, "has no 'answer'"),
        ({"prompt": "", "answer": "2"}, r"'prompt'\) is empty"),
        ({"prompt": "  \n", "answer": "2"}, "is empty"),
        ({"prompt": None, "answer": "2"}, "is NoneType"),
        ({"prompt": [], "answer": "2"}, "empty list"),
        ({"prompt": ["hi"], "answer": "2"}, "message 0 is 'hi'"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "2"}, r"message 0 \(user\) has content None"),
        ({"prompt": [{"role": "assistant", "content": "b"}], "answer": "2"}, "the assistant's own message"),
        ({"prompt": "1", "answer": None}, r"the answer \('answer'\) is None"),
        ({"prompt": "1", "answer": ["2"]}, r"\(list\); expected text or a number"),
        ({"prompt": "1", "answer": float("nan")}, "nan"),
        ({"prompt": "ü", "answer": "2"}, "does not know"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    good = {"prompt": "1", "answer": "2"}
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        build_prompts(rows(good, row), CHAT, character_tokenizer(CHATML), 100)


def test_all_bad_rows_are_told_at_once_up_to_ten() -> None:
    with pytest.raises(DataError) as caught:
        build_prompts(rows(*[{"prompt": ""}] * 30), CHAT, character_tokenizer(CHATML), 100)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 20 more"


def test_template_and_tokenizer_must_go_together() -> None:
    good = rows({"prompt": "1", "answer": "2"})
    with pytest.raises(DataError, match=r"set data\.chat_template=false"):
        build_prompts(good, CHAT, character_tokenizer(), 100)
    with pytest.raises(DataError, match=r"data\.system_prompt needs"):
        build_prompts(good, DataConfig(chat_template=False, system_prompt="x"), character_tokenizer(), 100)
    with pytest.raises(DataError, match="no system role"):
        build_prompts(good, DataConfig(system_prompt="x"), character_tokenizer(STRICT), 100)
    chat = rows({"prompt": [{"role": "user", "content": "1"}], "answer": "2"})
    with pytest.raises(DataError, match=r"needs data\.chat_template=true"):
        build_prompts(chat, PLAIN, character_tokenizer(), 100)
    own = rows({"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "1"}], "answer": "2"})
    with pytest.raises(DataError, match="system message of its own"):
        build_prompts(own, DataConfig(system_prompt="x"), character_tokenizer(CHATML), 100)
