"""From the configuration to SGLang's arguments, and every mistake in it. No SGLang is needed."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from hybridrl.config.schema import Config
from hybridrl.models.families import load_spec
from hybridrl.rollout.engines import installed_problems
from hybridrl.rollout.sglang import options
from hybridrl.rollout.sglang.options import EngineOptions
from tests.models.tiny import tiny_folder


def _config(**sglang: object) -> Config:
    config = Config()
    config.rollout.engine = "sglang"
    for name, value in sglang.items():
        setattr(config.rollout.sglang, name, value)
    return config


def test_what_the_installed_release_says_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(server_args={"schedule_polic": "lpm", "page_size": 1})
    monkeypatch.setattr(options, "require_supported", lambda: "0.5.23")
    monkeypatch.setattr(options, "server_arg_names", lambda: frozenset({"schedule_policy", "page_size"}))
    (problem,) = installed_problems(config)
    assert "server_args.schedule_polic" in problem
    config.rollout.engine = "transformers"
    assert installed_problems(config) == []
    config.rollout.engine, config.algorithm.name = "sglang", "sft"
    assert installed_problems(config) == []


def test_another_release_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.0")
    (problem,) = installed_problems(_config())
    assert problem.startswith("rollout.engine=sglang: SGLang 0.6.0 is installed")


def test_the_kv_cache_takes_no_more_than_there_is_room_for() -> None:
    spec = load_spec(tiny_folder("qwen3_moe"))  # 4 layers, 2 key-value heads of 8: 512 bytes a token in float32
    whole = EngineOptions(folder=Path(), dtype="float32", device="cpu", max_positions=128, kv_tokens=1000)
    assert options.with_room(whole, spec, 10**9, 100) == whole
    assert options.with_room(whole, spec, 512 * (164 + 300), 100).kv_tokens == 400
    assert options.with_room(replace(whole, tp=2), spec, 512 * (164 + 300), 100).kv_tokens == 864
    assert options.with_room(replace(whole, tp=2, dp=2), spec, 512 * (164 + 300), 100).kv_tokens == 400
    with pytest.raises(ValueError, match=r"leaves 83967 bytes .* a request of 100 tokens needs 83968 \(512 a token\)"):
        options.with_room(whole, spec, 512 * 164 - 1, 100)


def test_the_kv_cache_holds_the_longest_of_all_running_requests() -> None:
    config = _config(max_running_requests=8)
    config.rollout.max_prompt_length, config.rollout.max_response_length = 30, 70
    assert options.kv_tokens(config) == 800
    config.rollout.dp = 3
    assert options.kv_tokens(config) == 300
    config.rollout.sglang.kv_tokens = 500
    assert options.kv_tokens(config) == 500


def _options(**changes: object) -> EngineOptions:
    chosen = {
        "folder": tiny_folder("qwen3"),
        "dtype": "float32",
        "device": "cpu",
        "max_positions": 64,
        "kv_tokens": 256,
    }
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
