"""Printing the samples that a run kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.show_rollouts import main

SAMPLE: dict[str, Any] = {
    "step": 3,
    "prompt_id": 7,
    "sample": 0,
    "prompt": "1+1=",
    "response": "2",
    "answer": "2",
    "reward": 1.0,
    "advantages": 0.5,
    "prompt_tokens": 4,
    "response_tokens": 1,
    "versions": [2],
    "finish": "stop",
}


def test_whole_samples_are_shown_and_a_line_that_is_cut_short_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(SAMPLE), json.dumps({**SAMPLE, "prompt_id": 8, "answer": None}), json.dumps(SAMPLE)[:40]]
    (tmp_path / "step-00000003.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "prompt 7" in printed.out
    assert "prompt 8" in printed.out
    assert "step-00000003.jsonl:3 is left out" in printed.err
