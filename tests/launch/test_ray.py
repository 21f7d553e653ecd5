"""Ranks and judges on a local Ray cluster."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.config.compose import compose
from hybridrl.config.schema import JudgeConfig, RewardsConfig
from hybridrl.rewards.pool import Job
from tests.processes import PATIENCE_S, left_with

ray = pytest.importorskip("ray")

from hybridrl.launch.ray import launch  # noqa: E402
from hybridrl.rewards.ray_pool import RayJudgePool  # noqa: E402
from hybridrl.rewards.score import make_pool  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=True, logging_level="error")
    yield
    ray.shutdown()


def config(nodes: int = 1):
    return compose(["recipe=grpo_tiny_moe", "trainer.device=cpu", f"trainer.nodes={nodes}"])


def test_every_rank_has_its_place_and_meets_the_others(cluster: None, capfd: pytest.CaptureFixture[str]) -> None:
    ends = launch(config(), ["environment"], module="tests.launch.ranks")
    assert sorted((end.rank, end.code) for end in ends) == [(0, 0), (1, 0)]
    wanted, shown = "'RANK': '1', 'LOCAL_RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2'", ""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in shown and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray brings output a little later
        shown += "".join(capfd.readouterr())
    assert wanted in shown


@pytest.mark.parametrize(("what", "code", "error"), [("fail", 1, "broken on purpose"), ("killed", -9, "")])
def test_one_rank_that_fails_ends_all(cluster: None, tmp_path: Path, what: str, code: int, error: str) -> None:
    start = time.monotonic()
    ends = launch(config(), [what, str(tmp_path)], module="tests.launch.ranks")
    assert time.monotonic() - start < 300, "a rank that sleeps for ten minutes was waited for"
    first = next(end for end in ends if end.rank == 1)
    assert first.code == code
    assert error in first.error
    assert left_with(str(tmp_path), "cmdline") == [], "a rank was left behind"


def test_ranks_are_asked_to_save_before_they_are_ended(cluster: None, tmp_path: Path) -> None:
    told = threading.Event()

    def tell() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.1)
        told.set()

    threading.Thread(target=tell, daemon=True).start()
    ends = launch(config(), ["told", str(tmp_path)], module="tests.launch.ranks", told=told)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert {end.code for end in ends} == {128 + signal.SIGTERM}


def test_a_cluster_without_the_nodes_is_told(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrl.launch.ray.PLACEMENT_S", 1.0)
    with pytest.raises(RuntimeError, match=r"did not free 3 nodes with .*'CPU': 2"):
        launch(config(nodes=3), ["environment"], module="tests.launch.ranks")


JUDGES = "tests.launch.judges"


def pool(**limits: float) -> RayJudgePool:
    rewards = RewardsConfig(pool="ray", workers=2, judges=[JudgeConfig(name=f"{JUDGES}:judge")], **limits)
    made = make_pool(rewards)
    assert isinstance(made, RayJudgePool)
    return made


def test_judges_on_the_cluster_answer_in_order(cluster: None) -> None:
    with pool() as judges:
        for _ in range(2):
            found = judges.run([Job(0, str(n), None) for n in range(20)])
            assert [verdict.scores for verdict in found] == [{"score": float(n)} for n in range(20)]


def test_limits_hold_on_the_cluster(cluster: None) -> None:
    with pool(timeout_s=3.0, batch_timeout_s=200.0, memory_mb=200) as judges:
        found = judges.run([Job(0, what, None) for what in ("hang", "1", "die", "2", "hog", "3")])
        assert [verdict.kind for verdict in found] == ["timeout", "", "died", "", "memory", ""]
        assert judges.run([Job(0, "4", None)])[0].scores == {"score": 4.0}


def test_a_batch_has_a_limit_and_an_actor_that_is_lost_is_replaced(cluster: None) -> None:
    with pool(timeout_s=500.0, batch_timeout_s=3.0) as judges:
        found = judges.run([Job(0, what, None) for what in ("hang", "hang", "1")])
        assert [verdict.kind for verdict in found] == ["batch_timeout"] * 3
        judges._batch_timeout_s = 200.0  # actors start anew
        ray.kill(judges._hosts[0])
        found = judges.run([Job(0, "1", None), Job(0, "2", None)])
        assert [verdict.scores for verdict in found] == [{"score": 1.0}, {"score": 2.0}]


def test_a_judge_that_cannot_be_imported_is_refused(cluster: None) -> None:
    rewards = RewardsConfig(pool="ray", workers=1, judges=[JudgeConfig(name="tests.launch.judges:nowhere")])
    with pytest.raises(ValueError, match="nowhere"):
        make_pool(rewards).start()


@pytest.mark.full
def test_a_recipe_runs_on_ray_as_it_does_under_torchrun(tmp_path: Path) -> None:
    overrides = ["recipe=grpo_tiny_moe", "trainer.steps=3", "trainer.device=cpu"]
    for name, command in (
        ("torchrun", ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hybridrl.train"]),
        ("ray", ["-m", "hybridrl.launch.ray", "--address", "local"]),
    ):
        folder = f"trainer.output_dir={tmp_path / name}"
        subprocess.run([sys.executable, *command, *overrides, folder], cwd=ROOT, check=True, timeout=250)
    weights = [(tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("torchrun", "ray")]
    assert weights[0] == weights[1]
