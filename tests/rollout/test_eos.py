"""Which ids end a response, by a model's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.rollout.causal_model import eos_token_ids
from tests.models.tiny import tiny_folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [2, 106], (2, 106)),
        ([1, 106], None, (1, 106)),
        (0, 7, (0, 7)),
        (None, None, ()),
    ],
)
def test_both_files_count_with_one_id_or_several(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path) == expected


def test_the_generation_config_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert eos_token_ids(tmp_path) == (5,)


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, "</s>"]}')
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id holds \['</s>'\]"):
        eos_token_ids(tmp_path)


def test_a_folder_that_transformers_wrote() -> None:
    assert eos_token_ids(tiny_folder("qwen3_moe")) == (1, 2)
