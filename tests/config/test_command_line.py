"""A program behind `hydra_main`, as a user starts it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from hybridrl.config.compose import ConfigError, compose
from hybridrl.config.defaults import resolve_defaults
from hybridrl.config.folders import RECIPES
from hybridrl.config.load import hydra_main, save_config
from hybridrl.config.schema import Config, JudgeConfig
from hybridrl.config.strict import build
from tests.config.models import MOE
from tests.config.program import main as program

ROOT = Path(__file__).resolve().parent.parent.parent
ONE = ["recipe=grpo_tiny_moe", "trainer.ranks_per_node=1", "parallel.ep=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty folder, without a launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, main=program) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, main=program) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as error:
        start(monkeypatch, *arguments, main=main)
    assert error.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_the_task_gets_what_was_composed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problems = ["data.source=reasoning_gym", "data.path=null", "data.task=chain_sum"]
    words = [
        *ONE,
        *problems,
        "optimizer.lr=1e-5",
        "data.task_args.a=1",
        "+rewards.judges.0.args.b=2",
        "data.task_args.a=2",
    ]
    start(monkeypatch, *words)
    assert json.loads(capsys.readouterr().out) == asdict(compose(words))


def test_the_run_folder_alone_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch, *ONE, "trainer.output_dir=run")
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["run", "run/config.yaml"]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config, wrong = build(Config, saved)
    assert not wrong
    assert config == compose([*ONE, "trainer.output_dir=run"])
    assert saved["parallel"]["sequence_parallel"] is False


def test_saving_replaces_the_file_whole(tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "a" / "b")
    config = compose(["recipe=grpo_tiny_moe", "optimizer.lr=1e-6"])
    path = save_config(config, tmp_path / "a" / "b")
    assert os.listdir(path.parent) == ["config.yaml"]
    assert OmegaConf.load(path).optimizer.lr == 1e-6


SECRET = "never-to-be-read"
SECRET_NAMES = (
    *("api_key", "OPENAI_API_KEY", "apikey", "x-api-key", "password", "db_password", "passwd", "client_secret"),
    *("credentials", "auth_token", "access_token", "HF_TOKEN", "aws_secret_access_key", "private_key", "Authorization"),
)
OPEN_NAMES = ("eos_token", "stop_token", "tokenizer", "max_tokens", "key", "answer_key", "secretary", "password_length")


def test_what_a_name_calls_a_secret_is_not_saved(tmp_path: Path) -> None:
    config = Config()
    given = dict.fromkeys(SECRET_NAMES, SECRET) | {name: f"open {name}" for name in OPEN_NAMES}
    config.data.task_args = {**given, "unset": {"api_key": None}}
    config.rollout.sglang.server_args = {"nested": [{"deeper": given}]}
    config.rewards.judges = [JudgeConfig(name="http", args=given)]
    path = save_config(config, tmp_path)
    assert SECRET not in path.read_text()
    saved = yaml.safe_load(path.read_text())
    hidden = dict.fromkeys(SECRET_NAMES, "<hidden>") | {name: f"open {name}" for name in OPEN_NAMES}
    assert saved["data"]["task_args"] == {**hidden, "unset": {"api_key": None}}
    assert saved["rollout"]["sglang"]["server_args"] == {"nested": [{"deeper": hidden}]}
    assert saved["rewards"]["judges"][0]["args"] == hidden
    assert config.data.task_args["api_key"] == SECRET, "the run itself needs it"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("hf_" + "a1" * 17, "<hidden>"),
        ("Bearer sk-proj-" + "x_1-" * 8 + "z", "Bearer <hidden>"),
        ("postgres://me:word@host/rows", "postgres://<hidden>@host/rows"),
        ("http://host:8000/judge", "http://host:8000/judge"),
        ("hf_short task-disk-" + "a" * 30, "hf_short task-disk-" + "a" * 30),
    ],
)
def test_what_looks_like_a_secret_is_not_saved_under_any_name(tmp_path: Path, text: str, written: str) -> None:
    config = Config()
    config.rewards.judges = [JudgeConfig(name="m:f", args={"server": text})]
    assert (
        yaml.safe_load(save_config(config, tmp_path).read_text())["rewards"]["judges"][0]["args"]["server"] == written
    )


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=grpo_tiny_moe"],
        ["recipe=sft_tiny_moe", "optimizer.lr=1e-5", "parallel.tp=2", "+trainer.seed=3"],
        ["recipe=grpo_tiny_moe", "algorithm=dr_grpo", "data.task_args={a: 1}", "data.task_args.b=x", "optimizer=sgd"],
        ["recipe=grpo_smollm2_moe", "rewards.judges=[{name: exact},{name: math}]", "rewards.judges.1.weight=2"],
    ],
)
def test_cfg_job_shows_what_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    start(monkeypatch, "--cfg", "job", "--resolve", *words)
    shown, wrong = build(Config, yaml.safe_load(OmegaConf.to_yaml(OmegaConf.create(capsys.readouterr().out))))
    assert not wrong
    assert resolve_defaults(shown) == compose(words)


def test_cfg_job_shows_what_is_still_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, "--cfg", "job")
    assert "path: ???" in capsys.readouterr().out


def test_cfg_job_refuses_unknown_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1. optimizer.lrr: unknown key" in refused(monkeypatch, capsys, "--cfg", "job", "+optimizer.lrr=1")


def test_help_lists_the_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        start(monkeypatch, "--help")
    assert not error.value.code
    shown = capsys.readouterr().out
    recipes = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert f"recipe: {', '.join(recipes)}" in shown
    assert "torchrun --nproc-per-node" in shown


def test_all_kinds_of_mistakes_come_in_one_numbered_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optimizer.lrr=1", "+x=1", "optimizer.lr='1'", "rollout.top_p=0.5", "parallel.tp=3", "trainer.steps=0"]
    shown = refused(monkeypatch, capsys, *ONE, *words)
    for text in ("x: unknown", "lrr: unknown", "expected a number", "top_p=0.5", "tp=3", "trainer.steps=0"):
        assert text in shown
    assert shown.startswith("hybridrl: 6 mistakes in the configuration\n  1. ")
    assert "\n  6. " in shown


def test_the_wrong_number_of_ranks_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(monkeypatch, capsys, "recipe=grpo_tiny_moe")
    assert "world=1 was started: start by `torchrun --nproc-per-node 2 -m hybridrl.train" in shown


@pytest.mark.parametrize("flag", [["--multirun"], ["--config-name", "x"], ["--config-dir", "nowhere"]])
def test_what_is_not_supported_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    assert flag[0] in refused(monkeypatch, capsys, *ONE, *flag)


def test_the_model_the_device_and_the_registries_are_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = hydra_main(
        lambda config: None,
        spec=lambda config: MOE,
        device=lambda config: "cuda",
        names={"algorithm.advantage": ["grpo"]},
        further=lambda config: [f"rollout.sglang.server_args: {config.rollout.engine} has no such field"],
    )
    words = ["parallel.tp=2", "trainer.ranks_per_node=2", "algorithm.advantage=gae"]
    words += ["model.parameter_layout=megatron", "rollout.engine=sglang", "rollout.sglang.hosting=subprocess"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shown = refused(monkeypatch, capsys, *ONE, *words, main=main)
    told = ("silently wrong", "cannot be opened by another", "algorithm.advantage=gae", "server_args: sglang has")
    for text in told:
        assert text in shown


def test_a_device_that_is_absent_is_a_mistake_like_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def device(config: Config) -> str:
        raise ValueError("trainer.device=cuda: there is none")

    shown = refused(monkeypatch, capsys, *ONE, "rollout.top_k=3", main=hydra_main(lambda config: None, device=device))
    assert "trainer.device=cuda: there is none" in shown
    assert "rollout.top_k=3" in shown


def test_what_is_read_reaches_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    start(
        monkeypatch,
        *ONE,
        main=hydra_main(lambda config, rows: given.append(rows), read=lambda config: config.data.path),
    )
    assert given == ["builtin:tiny_sums"]


def test_mistakes_in_what_is_read_come_with_the_others_unless_they_follow_from_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(config: Config) -> None:
        raise ConfigError(["rows.jsonl:1: has no 'prompt'"])

    main = hydra_main(lambda config, rows: None, read=read)
    shown = refused(monkeypatch, capsys, *ONE, "rollout.top_k=3", main=main)
    assert "rollout.top_k=3" in shown
    assert "2. rows.jsonl:1: has no 'prompt'" in shown
    assert "rows.jsonl" not in refused(monkeypatch, capsys, *ONE, "data.path=nowhere.jsonl", main=main)


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError])
def test_a_model_that_cannot_be_read_is_a_mistake_like_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def spec(config: Config) -> None:
        raise kind("model_type 'gpt2' is not supported")

    shown = refused(monkeypatch, capsys, *ONE, "rollout.top_k=3", main=hydra_main(lambda config: None, spec=spec))
    assert "model.path=builtin:tiny_moe: model_type 'gpt2' is not supported" in shown
    assert "rollout.top_k=3" in shown


def test_a_configuration_error_of_the_task_is_reported_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(config: Config) -> None:
        raise ConfigError(["data.path=x: 3 rows do not fill a step of 8 prompts"])

    shown = refused(monkeypatch, capsys, *ONE, main=hydra_main(task))
    assert (
        shown == "hybridrl: 1 mistake in the configuration\n  1. data.path=x: 3 rows do not fill a step of 8 prompts\n"
    )


def test_under_torchrun_the_list_is_printed_by_one_rank_and_shown_last() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [str(ROOT / "tests" / "config" / "program.py"), "recipe=grpo_tiny_moe", "optimizer.lrr=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert run.returncode != 0
    before, _, after = run.stderr.partition("Root Cause")
    assert before.count("hybridrl: 1 mistake in the configuration") == 1
    assert "1. optimizer.lrr: unknown key; did you mean 'optimizer.lr'?" in after
    assert "Traceback (most recent call last)" not in after
