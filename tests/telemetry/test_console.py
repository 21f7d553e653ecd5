"""What a person reads: what will run, a line a step with the time left, and where the results are."""

import io
from pathlib import Path

from rich.console import Console

from hybridrl.config.compose import compose
from hybridrl.models.builtin import make_model
from hybridrl.models.families import load_spec
from hybridrl.telemetry.console import RunConsole


def console(steps: int) -> tuple[RunConsole, io.StringIO]:
    shown = io.StringIO()
    return RunConsole(steps, Console(file=shown, width=60)), shown


def test_a_run_is_introduced_by_its_model_ranks_data_and_batches(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    config = compose(["recipe=grpo_tiny_moe", "trainer.mini_batch_prompts=8"])
    config.trainer.output_dir = "out/[bold]x"
    run, shown = console(3)
    run.introduce(config, load_spec(tmp_path / "model"), device="cpu", rows=1234, dropped=5)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "grpo_tiny_moe: grpo on builtin:tiny_moe"
    assert lines[1] == "  model   qwen3_moe, 225 k parameters, 8 experts, float32"
    assert lines[2] == "  ranks   2 on cpu: TP 1 · CP 1 · PP 1 · EP 2 · ETP 1 · DP 2; engine transformers"
    assert lines[3].startswith("  data    1,234 rows, 5 over the length limit dropped")
    assert lines[4] == "  folder  out/[bold]x"
    assert [line.split()[-1] for line in lines[5:]] == ["32", "8", "256", "8", "4", "64", "2", "32"]


def test_a_step_is_one_line_and_shows_trouble_only_where_there_is_some() -> None:
    run, shown = console(10)
    run.step(1, {"reward/mean": 0.25, "loss/kl": 0.0, "reward/errors": 0.0, "time/step": 20.0})
    run.step(2, {"reward/mean": 0.5, "loss/kl": 0.1, "reward/errors": 3.0, "time/step": 10.0})
    first, second = shown.getvalue().splitlines()
    assert first.startswith("step  1/10  reward 0.25")
    assert first.endswith("left 3:00")
    assert "kl" not in first
    assert "errors" not in first
    assert "kl 0.1" in second
    assert "judge errors 3" in second
    assert second.endswith("left 2:00")


def test_a_resumed_run_is_reckoned_at_its_own_pace() -> None:
    run, shown = console(100)
    run.step(91, {"time/step": 10.0})
    run.step(92, {"time/step": 20.0, "tokens/generated": 3000.0})
    run.conclude(Path("out"), None)
    first, second, done, *_ = shown.getvalue().splitlines()
    assert first.endswith("left 1:30")
    assert "tokens/s 150 " in second
    assert second.endswith("left 2:00")
    assert done == "done: 2 steps in 0:30"


def test_the_end_says_where_things_are() -> None:
    run, shown = console(1)
    run.step(1, {"time/step": 3700.0})
    run.conclude(Path("out"), Path("out/hf"))
    run.conclude(Path("out"), None)
    for text in ("done: 1 steps in 1:01:40", "out/metrics.jsonl", "tensorboard --logdir out/tensorboard"):
        assert text in shown.getvalue()
    assert "model.path=out/hf" in shown.getvalue()
    assert "not written (trainer.export_final=false)" in shown.getvalue()
