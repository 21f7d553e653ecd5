"""What Weights & Biases gets, from a stand-in for its package."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hybridrl.config.schema import Config, JudgeConfig
from hybridrl.telemetry.console import RunConsole
from hybridrl.telemetry.metrics import MetricsWriter
from hybridrl.telemetry.tracker import Tracker


def test_steps_go_to_one_run_over_restarts_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    logged: list[Any] = []

    def init(**given: Any) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace(log=lambda m, step: logged.append((step, m)), finish=lambda: logged.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = Config()
    config.trainer.wandb_project, config.trainer.name = "project", "name"
    config.rewards.judges = [JudgeConfig(name="m:f", args={"api_key": "word-1"})]
    for step in (1, 2):
        console = RunConsole(2, Console(file=io.StringIO()))
        writer = MetricsWriter(tmp_path, console, done=step - 1, tracker=Tracker(config, tmp_path))
        writer.write(step, {"reward/mean": 0.5})
        writer.close()
    assert logged == [(1, {"reward/mean": 0.5}), "finished", (2, {"reward/mean": 0.5}), "finished"]
    assert made[0] == made[1]
    assert (made[0]["project"], made[0]["name"], made[0]["resume"]) == ("project", "name", "allow")
    assert "word-1" not in str(made)
