"""A run that was stopped and goes on is the run that was never stopped: the same samples, metrics and weights."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.checkpoint import export
from hybridrl.checkpoint.manifest import checkpoints
from hybridrl.config.load import compose
from hybridrl.telemetry.metrics import read_metrics
from tests.distributed.pool import WorkerError, WorkerPool

SMALL = (
    *("recipe=grpo_tiny_moe", "warm_start.steps=4", "warm_start.batch_size=16", "trainer.prompts_per_step=4"),
    *("rollout.n=4", "rewards.workers=1", "optimizer.lr=3e-3", "trainer.mini_batch_prompts=2", "data.seed=3"),
)
KL = ("algorithm.kl.where=loss", "algorithm.kl.coef=0.01")
BY_LENGTH = "rewards.judges=[{name: 'tests.distributed.test_resume:judge_by_length'}]"
TP2_EP2 = ("parallel.tp=2", "parallel.ep=2")
DYNAMIC = (
    *("algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.generation_prompts=6"),
    *("algorithm.dynamic_sampling.max_generation_batches=40",),
    BY_LENGTH,
)


def judge_by_length(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """Nearly every group has a signal, and some have none."""
    return float(len(response) % 2)


def stop_before(step: int) -> None:
    """Has this process's next run break at the start of a step."""
    from hybridrl import session

    original = session.Session.steps

    def broken(self: Any) -> Iterator[int]:
        for made in original(self):
            if made == step:
                session.Session.steps = original  # type: ignore[method-assign]
                raise ZeroDivisionError(f"stopped before step {step}")
            yield made

    session.Session.steps = broken  # type: ignore[method-assign]


def train(overrides: list[str], stop: int | None = None) -> None:
    from hybridrl.train import run

    if stop is not None:
        stop_before(stop)
    run(compose(overrides))


def launch(
    pool: WorkerPool,
    folder: Path,
    *overrides: str,
    world: int = 2,
    stop: int | None = None,
    every: int = 2,
    small: Sequence[str] = SMALL,
) -> list[dict[str, Any]]:
    words = [*small, f"trainer.output_dir={folder}", f"trainer.ranks_per_node={world}", f"checkpoint.every={every}"]
    if stop is None:
        pool.run(train, world=world, overrides=[*words, *overrides])
    else:
        with pytest.raises(WorkerError, match=f"stopped before step {stop}"):
            pool.run(train, world=world, overrides=[*words, *overrides], stop=stop)
    return read_metrics(folder / "metrics.jsonl")


def steady(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "memory/"))} for r in records]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "hf" / "model.safetensors"))


def check_alike(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("options", "rows", "stop"),
    [
        (KL, 10, 4),  # in the middle of an epoch; the reference is the warm start's
        (DYNAMIC, 12, 4),  # groups are pending, and an epoch ends in a batch
        pytest.param((), 8, 3, marks=pytest.mark.full),  # at the border of an epoch
        pytest.param(("optimizer.distributed=false", "model.dtype=bfloat16"), 10, 4, marks=pytest.mark.full),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, options: tuple[str, ...], rows: int, stop: int
) -> None:
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{a}+{a % 3}=", "answer": str(a + a % 3)} for a in range(rows)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (*options, "trainer.steps=5", f"data.path={data}", "warm_start.batch_size=8")
    expected = launch(pool, tmp_path / "straight", *common)
    before = launch(pool, tmp_path / "stopped", *common, stop=stop)
    found = launch(pool, tmp_path / "stopped", *common)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    assert len(before) == stop - 1
    assert steady(found) == steady(expected)
    check_alike(tmp_path / "stopped", tmp_path / "straight")
    for name in ("step-00000004.jsonl", "step-00000005.jsonl"):
        ours, theirs = (tmp_path / run / "rollouts" / name for run in ("stopped", "straight"))
        assert ours.read_text() == theirs.read_text()


OTHER = (
    pytest.param(("parallel.ep=2",), ("parallel.ep=1",), 1, id="one rank"),
    pytest.param((*TP2_EP2,), ("parallel.ep=1", "parallel.pp=2"), 2, id="pp2", marks=pytest.mark.full),
    pytest.param((*TP2_EP2,), ("parallel.ep=1",), 1, id="tp2 to one rank", marks=pytest.mark.full),
    pytest.param((*TP2_EP2,), ("parallel.ep=2", "parallel.pp=2"), 4, id="four ranks", marks=pytest.mark.full),
    pytest.param((*TP2_EP2,), (*TP2_EP2, "model.parameter_layout=megatron"), 2, id="layout", marks=pytest.mark.full),
    pytest.param(
        ("parallel.ep=1", "parallel.pp=2", "model.parameter_layout=megatron", "optimizer.distributed=false"),
        (*TP2_EP2, "memory.parameters=single"),
        2,
        id="pp2 to single",
        marks=pytest.mark.full,
    ),
)


@pytest.mark.parametrize(("saved", "resumed", "world"), OTHER)
def test_another_world_goes_on_with_the_same_data(
    pool: WorkerPool, tmp_path: Path, saved: tuple[str, ...], resumed: tuple[str, ...], world: int
) -> None:
    words = ("trainer.steps=3", "optimizer.lr=1e-3", BY_LENGTH)
    expected = launch(pool, tmp_path / "straight", *words, *saved)
    launch(pool, tmp_path / "stopped", *words, *saved, stop=3)
    found = launch(pool, tmp_path / "stopped", *words, *resumed, world=world)
    assert [record["data/epoch"] for record in found] == [record["data/epoch"] for record in expected]
    assert expected[2]["grad_norm"] > 1e-3
    for key in ("loss/policy", "entropy", "reward/mean"):
        assert found[2][key] == pytest.approx(expected[2][key], abs=1e-5)
    assert found[2]["lr"] == expected[2]["lr"]
    ours, theirs = (tmp_path / run / "rollouts" / "step-00000003.jsonl" for run in ("stopped", "straight"))
    drawn = [[json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in (ours, theirs)]
    assert drawn[0] == drawn[1]


def test_a_broken_checkpoint_is_left_and_the_one_before_it_used(pool: WorkerPool, tmp_path: Path) -> None:
    common = ("trainer.steps=4", "checkpoint.keep_last=3")
    expected = launch(pool, tmp_path / "run", *common, every=1)
    newest = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    broken = newest / "__1_0.distcp"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    assert steady(launch(pool, tmp_path / "run", *common, every=1)) == steady(expected)
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-00000002", "step-00000003", "step-00000004", "aside-step-00000004"}


def test_a_named_checkpoint_starts_a_run_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    launch(pool, tmp_path / "first", "trainer.steps=2")
    named = f"trainer.resume={tmp_path / 'first'}"
    goes_on = launch(pool, tmp_path / "second", "trainer.steps=3", named)
    assert [record["step"] for record in goes_on] == [3]
    words = ("trainer.steps=1", named, "checkpoint.load=weights", "warm_start.steps=0", "optimizer.schedule=constant")
    afresh = launch(pool, tmp_path / "third", *words, "optimizer.warmup_steps=2")
    assert [record["step"] for record in afresh] == [1]
    assert afresh[0]["lr"] == pytest.approx(2.25e-3)  # of 1.5e-3 and 3e-3: a warm-up that begins anew
    with pytest.raises(WorkerError, match=r"holds no kl|holds no|does not have"):
        launch(pool, tmp_path / "fourth", "trainer.steps=3", named, "recipe=sft_tiny_moe")


def test_what_a_run_cannot_go_on_with_is_told(pool: WorkerPool, tmp_path: Path) -> None:
    launch(pool, tmp_path / "run", "trainer.steps=2")
    with pytest.raises(
        WorkerError, match=r"moments exp_avg, exp_avg_sq of policy, and this run's optimizer keeps none"
    ):
        launch(pool, tmp_path / "run", "trainer.steps=3", "optimizer=sgd")
    with pytest.raises(WorkerError, match=r"CheckpointError: .*does not hold this run's policy"):
        launch(pool, tmp_path / "run", "trainer.steps=3", "model.path=builtin:tiny_glm4")


def notes_of(overrides: list[str]) -> list[str]:
    """What a run says on this rank's console beside its steps."""
    from hybridrl.telemetry.console import RunConsole

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunConsole, "note", lambda _, text, head="": said.append(head + text))
        train(overrides)
    return said


def test_settings_that_changed_are_told(pool: WorkerPool, tmp_path: Path) -> None:
    launch(pool, tmp_path / "run", "trainer.steps=2")
    words = [*SMALL, f"trainer.output_dir={tmp_path / 'run'}", "trainer.ranks_per_node=2", "checkpoint.every=2"]
    found = pool.run(notes_of, world=2, overrides=[*words, "trainer.steps=3", "optimizer.lr=1e-3", "rollout.n=2"])
    told = "not made with: rollout.n=2 (was 4); optimizer.lr=0.001 (was 0.003); trainer.steps=3 (was 2)"
    assert [told in " ".join(said) for said in found] == [True, False]


def test_the_metrics_of_a_finished_run_stay(pool: WorkerPool, tmp_path: Path) -> None:
    first = launch(pool, tmp_path / "run", "trainer.steps=2")
    assert launch(pool, tmp_path / "run", "trainer.steps=2") == first
    assert len(launch(pool, tmp_path / "run", "trainer.steps=2", "trainer.resume=none")) == 2
    assert read_metrics(tmp_path / "run.1" / "metrics.jsonl") == first


def test_a_checkpoint_is_exported_as_the_run_exports_its_model(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(pool, tmp_path / "run", "trainer.steps=2")
    words = [
        str(tmp_path / "run"),
        str(tmp_path / "out"),
        "--source",
        "builtin:tiny_moe",
        "--max-shard-bytes",
        "300000",
    ]
    assert export.main(words) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    ours = {name: value for file in files for name, value in load_file(file).items()}
    theirs = weights(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "other"), "--source", "builtin:tiny_glm4"]) == 1
    assert "tensor model.layers.0.self_attn.q_proj.bias is not in the checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
