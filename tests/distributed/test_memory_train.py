"""A whole run whose memory comes and goes is the run whose memory stays."""

from pathlib import Path

from hybridrl.telemetry.memory import read_trace
from tests.distributed.pool import WorkerPool
from tests.distributed.test_train import launch, steady

QUIET = ("trainer.export_final=false", "algorithm.kl.where=loss", "optimizer.lr=3e-3", "model.dtype=bfloat16")
MOVED = ("memory.optimizer=host", "memory.reference=disk", "memory.verify=true", "memory.prefetch=false")
OWNERS = ["parameters", "gradients", "master weights", "moments", "engine weights", "KV cache", "staging"]


def test_what_leaves_the_device_changes_no_number_of_a_run(pool: WorkerPool, tmp_path: Path) -> None:
    stayed = launch(pool, tmp_path / "stayed", *QUIET, "memory.optimizer=none", "memory.gradients=keep")
    moved = launch(pool, tmp_path / "moved", *QUIET, *MOVED, "memory.parameters=offload")
    assert steady(stayed) == steady(moved)
    assert all(record["memory/out_bytes"] == record["memory/in_bytes"] > 0 for record in moved[1:])
    assert "memory/out_bytes" not in stayed[0]
    assert (tmp_path / "moved" / "memory.png").stat().st_size > 10_000
    trace = read_trace(tmp_path / "moved" / "memory.jsonl")
    assert [record["step"] for record in trace] == sorted([1, 2, 3] * 6)
    assert all(list(record["owners"]) == OWNERS for record in trace)
    assert all(record["total"] == sum(record["owners"].values()) for record in trace)
    rollout = [record["owners"] for record in trace if record["event"] == "rollout"]
    assert all(owners[name] == 0 for owners in rollout for name in ("gradients", "master weights", "moments"))
