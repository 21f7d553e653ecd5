"""From the configuration to SGLang's arguments, and every mistake in it. No SGLang is needed."""

from pathlib import Path

import pytest

from hybridrl.config.schema import Config
from hybridrl.rollout.sglang import options
from hybridrl.rollout.sglang.options import EngineOptions


def _config(**sglang: object) -> Config:
    config = Config()
    config.rollout.engine = "sglang"
    for name, value in sglang.items():
        setattr(config.rollout.sglang, name, value)
    return config


def test_a_default_configuration_has_no_problems() -> None:
    assert options.problems(_config()) == []


def test_another_engine_is_not_looked_at() -> None:
    config = _config(hosting="nowhere")
    config.rollout.engine = "transformers"
    assert options.problems(config) == []


def test_all_problems_are_listed_at_once() -> None:
    config = _config(hosting="in_proces", kv_tokens=100, max_running_requests=0, server_args={"tp_size": 2})
    config.rollout.dp = 2
    found = options.problems(config)
    assert len(found) == 5
    for expected in ("server_args.tp_size", "did you mean 'in_process'", "rollout.dp=2", "kv_tokens=100", "requests=0"):
        assert any(expected in problem for problem in found), expected


def test_the_kv_cache_holds_the_longest_of_all_running_requests() -> None:
    config = _config(max_running_requests=8)
    config.rollout.max_prompt_length, config.rollout.max_response_length = 30, 70
    assert options.kv_tokens(config) == 800
    config.rollout.sglang.kv_tokens = 500
    assert options.kv_tokens(config) == 500


def _options(**changes: object) -> EngineOptions:
    chosen = {"folder": Path("m"), "dtype": "float32", "device": "cpu", "max_positions": 64, "kv_tokens": 256}
    return EngineOptions(**{**chosen, **changes})  # type: ignore[arg-type]


def test_users_fields_reach_sglang_and_replace_defaults() -> None:
    args = options.in_process_args(_options(server_args={"schedule_policy": "lpm", "attention_backend": "triton"}))
    assert (args["schedule_policy"], args["attention_backend"]) == ("lpm", "triton")
    assert args["disable_overlap_schedule"]


def test_a_field_that_is_decided_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"server_args.dtype: decided by model.dtype; leave it out"):
        _options(server_args={"dtype": "half"})


def test_an_unknown_field_is_named_with_what_was_meant() -> None:
    (problem,) = options.field_problems({"schedule_polic": "lpm"}, ["schedule_policy", "page_size"])
    assert "server_args.schedule_polic" in problem
    assert "did you mean 'schedule_policy'?" in problem


def test_sizes_below_one_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"rollout.tp=0 .*; rollout.sglang.kv_tokens=0"):
        _options(tp=0, kv_tokens=0)
