"""What is told of the settings of a run that goes on."""

from typing import Any

from hybridrl.checkpoint.settings import Settings, differences
from hybridrl.config.schema import Config, JudgeConfig


def test_every_other_value_is_told_by_its_key() -> None:
    before: dict[str, Any] = {
        "optimizer": {"lr": 0.1, "name": "adam"},
        "data": {"task_args": {"a": 1}},
        "plan": {"x": 1},
    }
    after: dict[str, Any] = {
        "optimizer": {"lr": 0.2, "name": "adam"},
        "data": {"task_args": {"b": [1]}},
        "plan": {"x": 2},
    }
    assert differences(before, after) == [
        "optimizer.lr=0.2 (was 0.1)",
        "data.task_args.b=[1] (was absent)",
        "data.task_args.a=absent (was 1)",
    ]
    assert differences(before, before) == []


def test_secrets_are_neither_saved_nor_told() -> None:
    told: list[str] = []
    first, second = Config(), Config()
    first.rewards.judges = [JudgeConfig(name="m:f", args={"api_key": "word-1"})]
    second.rewards.judges = [JudgeConfig(name="m:f", args={"api_key": "word-2"})]
    state = Settings(first, told.append).state_dict()
    assert "word-1" not in state["json"]
    Settings(second, told.append).load_state_dict(state)
    assert told == []
