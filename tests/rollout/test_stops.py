"""Where a response ends by its text: token by token against the text of the whole response."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl.rollout.collect import check_samples
from hybridrl.rollout.samples import Finish, SamplingParams
from hybridrl.rollout.stops import Decode, Ending, StopStrings, decoder
from tests.data.tokenizers import character_tokenizer
from tests.rollout.common import loaded_engine, prompt, requests


def byte_tokenizer() -> Any:
    """One token a byte, and tokens that hold the end of one character and the begin of another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<eos>", *alphabet])}
    merges = []
    for left, right in [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("©", "Ã"), ("ab", "ab"), ("b", "Ã")]:
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def saved(tokenizer: Any, folder: Path) -> Decode:
    tokenizer.save_pretrained(folder)
    return decoder(folder)


def slow_end(stops: tuple[str, ...], tokens: list[int], decode: Decode) -> int | None:
    """Tokens of the shortest beginning whose text holds a stop string."""
    found = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
    return next(found, None)


def end(stops: tuple[str, ...], tokens: list[int], decode: Decode) -> int | None:
    watch = StopStrings(stops, decode)
    return next((n for n, token in enumerate(tokens, 1) if watch.append(token)), None)


@pytest.mark.parametrize("make", [byte_tokenizer, character_tokenizer])
def test_the_end_is_where_the_whole_text_first_holds_a_stop(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    decode, draw = saved(tokenizer, tmp_path), random.Random(3)
    ids = tokenizer("ab é éa bé aab", add_special_tokens=False)["input_ids"]
    narrow = sorted({*ids, tokenizer.eos_token_id, *range(len(tokenizer) - 6, len(tokenizer))})
    stops = [("ab",), ("b a",), ("é", "abab"), ("éa",), ("b é",), ("zzzz",), (tokenizer.eos_token,), (" a", "aa")]
    ends = set()
    for _ in range(400):
        chosen, tokens = draw.choice(stops), draw.choices(narrow, k=draw.randrange(1, 24))
        found = end(chosen, tokens, decode)
        assert found == slow_end(chosen, tokens, decode), (chosen, tokens)
        ends.add(found)
    assert None in ends
    assert len(ends) > 8


def test_a_stop_over_several_tokens_and_one_inside_a_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    decode = saved(tokenizer, tmp_path)
    spanning = [tokenizer.convert_tokens_to_ids(t) for t in ["x", "ab", "Ġ", "y"]]
    assert end(("b y",), spanning, decode) == 4
    inside = [tokenizer.convert_tokens_to_ids(t) for t in ["x", "abab", "y"]]
    assert end(("ba",), inside, decode) == 2


def test_a_character_that_comes_byte_by_byte(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    decode = saved(tokenizer, tmp_path)
    tokens = [tokenizer.convert_tokens_to_ids(t) for t in ["a", "Ã", "©", "b"]]
    assert end(("é",), tokens, decode) == 3
    assert end(("aé",), tokens, decode) == 3
    assert end(("éb",), tokens, decode) == 4
    garbage = [tokenizer.convert_tokens_to_ids("Ã")] * 200
    assert end(("b",), [*garbage, *tokens], decode) == 204
    assert end(("ab",), [tokens[0], *garbage, tokens[3]], decode) is None


def test_ends_are_told_apart_and_a_stop_goes_before_the_limit() -> None:
    def finish(limit: int, *tokens: int, **params: Any) -> list[Finish | None]:
        ending = Ending(SamplingParams(**params), limit, lambda ids: "".join(chr(96 + i) for i in ids))
        return [ending.append(token) for token in tokens]

    assert finish(3, 1, 2, 3) == [None, None, Finish.LENGTH]
    assert finish(3, 1, 2, 3, stop=("bc",)) == [None, None, Finish.STOP]
    assert finish(3, 1, 2, 3, stop_token_ids=(3,)) == [None, None, Finish.STOP]
    assert finish(9, 1, 2, stop=("x", "ab"), stop_token_ids=(5,)) == [None, Finish.STOP]
    with pytest.raises(ValueError, match="need the engine to have a tokenizer"):
        Ending(SamplingParams(stop=("a",)), 3, None)


def test_the_embedded_engine_ends_by_text_and_keeps_the_stops_tokens(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    decode = saved(tokenizer, tmp_path)
    engine = loaded_engine("qwen3_moe", tokenizer=tmp_path, max_batch_size=3)
    asked = [prompt(i) for i in range(4)]
    whole = engine.generate(requests(asked, n=3, max_new_tokens=30))
    stops = tuple({decode(s.response_ids[i : i + 2]) for i, s in zip((4, 9, 0), whole, strict=False)})
    again = requests(asked, n=3, max_new_tokens=30, stop=stops)
    samples = engine.generate(again)
    check_samples(again, samples, decode)
    stopped = 0
    for sample, full in zip(samples, whole, strict=True):
        length = slow_end(stops, full.response_ids, decode)
        assert sample.response_ids == full.response_ids[:length]
        assert sample.finish is (Finish.LENGTH if length is None else Finish.STOP)
        assert sample.log_probs == pytest.approx(full.log_probs[:length], abs=1e-5)
        stopped += length is not None
    assert stopped >= 3
    with pytest.raises(ValueError, match=r"stop strings \['a'\] need the engine to have a tokenizer"):
        loaded_engine().generate(requests(asked, stop=("a",)))
    with pytest.raises(ValueError, match="holds an empty string"):
        engine.generate(requests(asked, stop=("",)))
