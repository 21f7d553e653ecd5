"""A task's error is left in torchrun's file; a refused configuration is not an error of that kind."""

import json
from pathlib import Path

import pytest

from hybridrl.config.compose import ConfigError
from hybridrl.parallel import failure
from hybridrl.parallel.failure import recorded


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(failure, "PAUSE_S", 0.0)
    return tmp_path / "error.json"


def test_an_error_is_left_in_the_file_and_raised(file: Path) -> None:
    def task(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="broken"):
        recorded(task)("broken")
    assert "RuntimeError: broken" in json.loads(file.read_text())["message"]["message"]


def test_a_refused_configuration_is_raised_alone(file: Path) -> None:
    def task(problem: str) -> None:
        raise ConfigError([problem])

    with pytest.raises(ConfigError, match=r"1\. data\.path"):
        recorded(task)("data.path is missing")
    assert not file.exists()


def test_a_task_that_ends_well_gets_its_arguments(file: Path) -> None:
    given: list[tuple[int, int]] = []
    recorded(lambda first, *, second: given.append((first, second)))(1, second=2)
    assert given == [(1, 2)]
    assert not file.exists()
