"""Pairs and verdicts: the prompt of a rollout, two responses that end, and clear errors."""

from typing import Any

import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data.builtin import tiny_pairs, tiny_verdicts
from hybridrl.data.errors import DataError
from hybridrl.data.preferences import Verdict, build_pairs, build_verdicts
from hybridrl.data.prompts import build_prompts
from hybridrl.data.rows import Row
from hybridrl.data.stream import PreferenceStream
from tests.data.tokenizers import CHATML, character_tokenizer

PLAIN = DataConfig(chat_template=False, margin_key="by")
ROW = {"prompt": "3+5=", "chosen": "8", "rejected": "99", "by": 2}


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [Row(f"d:{i}", f) for i, f in enumerate(fields, 1)]


def test_a_pair_has_one_prompt_and_two_responses_that_end() -> None:
    tokenizer = character_tokenizer(eos="<eos>")
    (pair,) = build_pairs(rows(ROW), PLAIN, tokenizer, 20).examples
    assert tokenizer.decode(pair.chosen.token_ids) == "3+5=8<eos>"
    assert tokenizer.decode(pair.rejected.token_ids) == "3+5=99<eos>"
    assert pair.chosen.mask == (False,) * 4 + (True,) * 2
    assert pair.margin == 2.0


def test_a_pair_under_a_chat_template_starts_as_a_rollout_does() -> None:
    tokenizer, config = character_tokenizer(CHATML), DataConfig()
    (pair,) = build_pairs(rows(ROW), config, tokenizer, 200).examples
    (prompt,) = build_prompts(rows({"prompt": "3+5=", "answer": "8"}), config, tokenizer, 200).prompts
    for response, text in ((pair.chosen, "8<|end|>"), (pair.rejected, "99<|end|>")):
        start = response.mask.index(True)
        assert response.token_ids[:start] == prompt.token_ids
        assert tokenizer.decode(response.token_ids[start:]) == text


def test_a_pair_is_as_long_as_its_longer_sequence() -> None:
    tokenizer = character_tokenizer(eos="<eos>")
    found = build_pairs(rows(ROW, {**ROW, "rejected": "7"}), PLAIN, tokenizer, 6)
    assert (len(found.examples), found.dropped) == (1, 1)


def test_a_prompt_answered_by_another_response() -> None:
    tokenizer = character_tokenizer(eos="<eos>")
    config = DataConfig(chat_template=False)
    labelled = rows(
        {"prompt": "1+1=", "completion": "2", "label": True}, {"prompt": "9=", "completion": "345", "label": False}
    )
    one, other = build_verdicts(labelled, config, tokenizer, 20).examples
    assert isinstance(one, Verdict)
    assert (one.desirable, other.desirable) == (True, False)
    strange = one.answered_by(other)
    assert tokenizer.decode(strange.token_ids) == "1+1=345<eos>"
    assert strange.mask == (False,) * 4 + (True,) * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**ROW, "rejected": "8"}, "same response under 'chosen' and 'rejected'"),
        ({"prompt": "1", "chosen": "2", "by": 0}, r"has no 'rejected' \(data.rejected_key\)"),
        ({**ROW, "chosen": 8}, r"the response \('chosen'\) is 8; expected text"),
        ({**ROW, "by": -1}, r"the margin \('by'\) is -1"),
        ({**ROW, "by": "much"}, r"the margin \('by'\) is 'much'"),
        ({**ROW, "chosen": ""}, "has no answer"),
    ],
)
def test_pairs_that_cannot_be_used_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"d:1: .*{message}"):
        build_pairs(rows(fields), PLAIN, character_tokenizer(eos="<eos>"), 20)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "1", "completion": "2", "label": 1}, "the label .* is 1; expected true or false"),
        ({"prompt": "1", "completion": "2", "label": True}, "every label .* is True"),
    ],
)
def test_verdicts_that_cannot_be_used_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_verdicts(rows(fields), DataConfig(chat_template=False), character_tokenizer(eos="<eos>"), 20)


def test_rows_that_are_held_out_are_never_handed_out() -> None:
    stream = PreferenceStream(list("abcdef"), batch=2, seed=0, holdout=2)
    assert stream.size == 4
    assert sorted(stream.next(2) + stream.next(2)) == [0, 1, 2, 3]
    assert list(stream.held_out) == [4, 5]
    with pytest.raises(DataError, match=r"preference.holdout=5 of 6 usable rows leaves fewer than a batch"):
        PreferenceStream(list("abcdef"), batch=2, seed=0, holdout=5)


def test_the_builtin_sets_hold_each_sum_and_no_wrong_label() -> None:
    pairs = tiny_pairs()
    assert len({(row["prompt"], row["rejected"]) for row in pairs}) == len(pairs) == 300
    for row in pairs:
        total = sum(map(int, row["prompt"][:-1].split("+")))
        assert int(row["chosen"]) == total != int(row["rejected"])
    labelled = tiny_verdicts()
    assert len({(row["prompt"], row["label"]) for row in labelled}) == len(labelled) == 200
    for verdict in labelled:
        total = sum(map(int, str(verdict["prompt"])[:-1].split("+")))
        assert (int(verdict["completion"]) == total) == verdict["label"]
