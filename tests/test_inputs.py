"""What a run reads: every mistake in it is told before anything is started, and several at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.compose import ConfigError, compose
from hybridrl.inputs import load_tokenizer, read_inputs
from hybridrl.models.builtin import make_model
from tests.data.tokenizers import CHATML, character_tokenizer

SUMS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(5)]
RECIPE = ("recipe=grpo_tiny_moe", "trainer.prompts_per_step=4", "warm_start.batch_size=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder)
    return folder


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_inputs(compose([*RECIPE, *overrides]))
    return error.value.problems


def test_everything_is_read_once(model: Path, tmp_path: Path) -> None:
    long = [{"prompt": "1+" * 20 + "1=", "answer": "21"}]
    words = [*RECIPE, f"model.path={model}", f"data.path={rows_file(tmp_path, SUMS + long)}"]
    inputs = read_inputs(compose(words))
    assert inputs.prompts is not None
    assert inputs.demonstrations is not None
    assert (inputs.rows, inputs.dropped, inputs.eos_ids) == (5, 1, (1,))
    assert (inputs.model_folder, inputs.tokenizer_folder) == (model, model)
    supervised = read_inputs(compose([*words, "algorithm=sft", "warm_start.steps=0"]))
    assert supervised.prompts is None
    assert (supervised.rows, supervised.dropped) == (5, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.chat_template=true", ["data.chat_template=true", "no chat template"]),
        ("data.system_prompt=Hello", ["data.system_prompt needs data.chat_template=true"]),
        ("data.prompt_key=question", ["rows.jsonl:1: has no 'question' (data.prompt_key)", "'prompt', 'answer'"]),
        ("data.answer_key=gold", ["has no 'gold' (data.answer_key"]),
        ("trainer.prompts_per_step=8", ["5 usable rows", "trainer.prompts_per_step=8"]),
        ("warm_start.batch_size=6", ["5 usable rows", "warm_start.batch_size=6"]),
        ("data.path=null data.source=reasoning_gym data.task=chain_sums", ["'chain_sums'", "near: chain_sum"]),
        (
            "data.path=null data.source=reasoning_gym data.task=chain_sum data.task_args.min_term=3",
            ["does not know min_term", "min_terms"],
        ),
    ],
)
def test_data_that_cannot_be_used_is_told(model: Path, tmp_path: Path, overrides: str, words: list[str]) -> None:
    found = problems(f"model.path={model}", f"data.path={rows_file(tmp_path, SUMS)}", *overrides.split())
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_several_mistakes_are_told_together(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = problems(f"model.path={tmp_path}", f"model.tokenizer={model}", "data.chat_template=true", "data.path=/none")
    assert [text.partition(":")[0].partition("=")[0] for text in found] == [
        "model.path",
        "data.path",
        "data.chat_template",
    ]


def test_a_folder_without_tokenizer_files_has_no_tokenizer(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    (found,) = problems(f"model.path={model}", f"model.tokenizer={tmp_path}")
    assert found.startswith(f"model.tokenizer={tmp_path}: cannot be loaded: ")


def test_the_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    character_tokenizer(CHATML).save_pretrained(tmp_path)
    (found,) = problems(f"model.path={model}", f"model.tokenizer={tmp_path}", "rollout.max_prompt_length=64")
    assert "another model's tokenizer" in found
    assert "knows 19 tokens" in found
