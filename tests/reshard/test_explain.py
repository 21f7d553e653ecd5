"""The command line, against figures derived by hand or published."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.reshard import explain
from tests.models.tiny import tiny_folder

RANK_KEYS = {
    "rank", "aliased_bytes", "copied_bytes", "received_bytes", "sent_bytes", "staging_peak_bytes", "destination_bytes"
}  # fmt: skip


def run(tmp_path: Path, model: str, world: int, train: str, rollout: str, *more: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    options = ["--model", model, "--world", str(world), "--train", train, "--rollout", rollout, "--json", str(out)]
    assert explain.main([*options, *more]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_the_example_receives_407_megabytes_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, "qwen3_30b_a3b", 8, "tp=4,ep=8", "tp=8,ep=8", "--interconnect", "h100-nvl8")
    assert report["received_bytes_max"] == report["lower_bound_bytes"] == 407_240_704
    assert report["model_bytes"] == 61_064_245_248
    assert report["gather_bytes"] == pytest.approx(53.0e9, rel=1e-3)
    assert [one["rank"] for one in report["ranks"]] == list(range(8))
    for one in report["ranks"]:
        assert set(one) >= RANK_KEYS
        arrived = one["aliased_bytes"] + one["copied_bytes"] + one["received_bytes"]
        assert arrived == one["destination_bytes"]
        assert one["staging_peak_bytes"] <= 2 * 256 * 2**20
    assert sum(one["sent_bytes"] for one in report["ranks"]) == sum(one["received_bytes"] for one in report["ranks"])
    assert 0 < report["predicted_seconds"] < report["gather_predicted_seconds"] / 20
    printed = capsys.readouterr().out
    assert "407.2 MB (lower bound 407.2)" in printed


@pytest.mark.parametrize(
    ("world", "train", "rollout", "gather", "minimal", "stays"),
    [
        (8, "tp=4,ep=8", "tp=8", 53.0, 6.749, 0.13),
        (8, "tp=2,pp=2,ep=4", "tp=8,ep=8", 53.0, 7.668, 0.13),
        (8, "tp=4,pp=2,ep=2,etp=2", "tp=4,ep=4", 53.4, 11.267, 0.26),
        (16, "tp=1,ep=8", "tp=8,ep=8", 50.7, 0.0, 1.0),
    ],
)
def test_figures_of_the_field_are_met(
    tmp_path: Path, world: int, train: str, rollout: str, gather: float, minimal: float, stays: float
) -> None:
    report = run(tmp_path, "qwen3_30b_a3b", world, train, rollout)
    assert report["gather_bytes"] / 1e9 == pytest.approx(gather, abs=0.05)
    assert report["received_bytes_max"] / 1e9 == pytest.approx(minimal, abs=0.001)
    moved = sum(one["received_bytes"] for one in report["ranks"])
    assert 1 - moved / sum(one["destination_bytes"] for one in report["ranks"]) == pytest.approx(stays, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "world", "train", "rollout", "gather", "minimal"),
    [
        ("qwen3_235b_a22b", 64, "tp=4,pp=4,ep=16", "tp=16,ep=16", 462, 22.96),
        ("deepseek_v3", 256, "pp=16,ep=16", "tp=32,ep=32", 1338, 43.83),
    ],
)
def test_large_models_too(
    tmp_path: Path, model: str, world: int, train: str, rollout: str, gather: float, minimal: float
) -> None:
    report = run(tmp_path, model, world, train, rollout, "--interconnect", "h800", "--placement", "auto")
    assert report["gather_bytes"] / 1e9 == pytest.approx(gather, abs=0.5)
    assert report["received_bytes_max"] / 1e9 == pytest.approx(minimal, abs=0.01)


def test_parameters_in_the_engines_layout_are_shared_where_the_sizes_are_equal(tmp_path: Path) -> None:
    engine, megatron = (
        run(tmp_path, "qwen3_30b_a3b", 8, "tp=8,ep=8", "tp=8,ep=8", "--parameter-layout", layout)
        for layout in ("engine", "megatron")
    )
    for one in engine["ranks"]:
        assert one["aliased_bytes"] == one["destination_bytes"] > 7e9
        assert one["copied_bytes"] == one["received_bytes"] == one["staging_peak_bytes"] == 0
    for one in megatron["ranks"]:
        assert one["aliased_bytes"] < 0.1 * one["destination_bytes"]
    assert megatron["received_bytes_max"] > 0  # four key heads on eight ranks


def test_data_parallel_attention_leaves_experts_and_attention_where_they_are(tmp_path: Path) -> None:
    report = run(tmp_path, "qwen3_30b_a3b", 8, "tp=4,ep=8", "tp=8,dp=2,ep=8")
    head = 151936 // 8 * 2048 * 2
    assert report["received_bytes_max"] <= head * 2
    planner, _ = explain.explain(
        explain._parser().parse_args(
            ["--model", "qwen3_30b_a3b", "--world", "8", "--train", "tp=4,ep=8", "--rollout", "tp=8,dp=2,ep=8"]
        )
    )
    moved = {kind.tensors[0][1].role for kind, routes in planner.routes.kinds if any(route.flows for route in routes)}
    assert moved <= {"embed", "lm_head"}


def test_a_folder_is_a_model_and_a_heat_map_is_a_picture(tmp_path: Path) -> None:
    config = explain.read_conf("model", "qwen3_8b", "config")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    picture = tmp_path / "heat.png"
    report = run(tmp_path, str(tmp_path), 4, "tp=2", "tp=4", "--heat-map", str(picture), "--bucket", "1000000")
    assert report["rounds"] > 1
    assert max(one["staging_peak_bytes"] for one in report["ranks"]) <= 2_000_000
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_placement_auto_saves_and_lists_the_ranks(tmp_path: Path) -> None:
    fixed = run(tmp_path, "moonlight_16b", 8, "tp=2,pp=2,ep=4", "tp=4,ep=4")
    best = run(tmp_path, "moonlight_16b", 8, "tp=2,pp=2,ep=4", "tp=4,ep=4", "--placement", "auto")
    assert sorted(best["placement"]) == list(range(8))
    moved = [sum(one["received_bytes"] for one in report["ranks"]) for report in (fixed, best)]
    assert moved[0] - moved[1] == best["placement_saved_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "tp=4,xp=2"], "'xp' in 'tp=4,xp=2' is none of tp, cp"),
        (["--train", "tp=four"], "give a whole number"),
        (["--train", "tp=3"], "world=8 is not TP"),
        (["--rollout", "tp=16"], "world=8 is no multiple of rollout.tp=16"),
        (["--model", "nonsense"], "'nonsense' is no folder and not in conf/model, which has deepseek_v3"),
        (["--interconnect", "string"], "not in conf/interconnect, which has a100-ib200"),
        (["--train", "pp=32", "--world", "32"], "48 layers on pp=32 stages: say first= and last= layers"),
    ],
)
def test_options_that_make_no_reshard_are_errors(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", "qwen3_30b_a3b", "--world", "8"]
    assert explain.main([*base, *options]) == 2
    assert message in capsys.readouterr().err


def test_it_is_told_what_becomes_of_the_projections_of_latent_attention(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variant, latent in (("deepseek_moe", True), ("qwen3_moe", False)):
        sizes = ["--world", "2", "--train", "tp=2,ep=2", "--rollout", "tp=2,ep=2"]
        options = ["--model", str(tiny_folder(variant)), *sizes]
        assert explain.main(options) == 0
        told = capsys.readouterr().out
        assert ("linear_q_down_proj" in told) == latent
        assert ("views of the engine's kv_b_proj" in told) == latent
        for layout in ("engine", "megatron"):
            planner, _ = explain.explain(explain._parser().parse_args([*options, "--parameter-layout", layout]))
            assert not any("attention.linear_q_down" in alias.source for alias in planner.aliases(0))
