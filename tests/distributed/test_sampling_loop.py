"""Ways to sample and to learn, on ranks: dynamic sampling, greedy baselines, corrections, several updates."""

from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch.distributed as dist

from hybridrl.config.load import compose
from hybridrl.rollout.samples import Request, Sample
from hybridrl.sampling_loop import collect
from hybridrl.session import Session
from tests.distributed.pool import WorkerError, WorkerPool
from tests.distributed.test_train import launch, steady

DYNAMIC = (
    "algorithm=dapo",
    "algorithm.dynamic_sampling.generation_prompts=2",
    "trainer.export_final=false",
)


def judge_by_length(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    return len(response) / 100


def judge_none(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    return 0.0


def judge_by_digest(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """1 for about a fifth of the responses, whatever they say."""
    return float(crc32(response.encode()) % 5 == 0)


def watched(folder: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Collects the groups of some steps: what this rank's replica was asked for, and what came of it."""
    common = ["recipe=grpo_tiny_moe", "trainer.ranks_per_node=2", "warm_start.steps=0", "rewards.workers=1"]
    config = compose([*common, "trainer.prompts_per_step=4", "rollout.n=4", f"trainer.output_dir={folder}", *overrides])
    asked: list[list[int]] = []
    with Session(config) as session:
        generate = session.engine.generate

        def counted(requests: list[Request]) -> list[Sample]:
            asked.append([r.prompt.id for r in requests])
            return generate(requests)

        session.engine.generate = counted  # type: ignore[method-assign]
        found = []
        for step in range(1, steps + 1):
            with session.rollout_phase(version=step - 1):
                groups, metrics = collect(session, step)
            found.append(([_facts(s) for g in groups for s in g.samples], metrics))
            assert session.engine.version is None  # asleep
    return {"asked": asked, "found": found, "rank": dist.get_rank()}


def _facts(sample: Sample) -> tuple[Any, ...]:
    return sample.prompt.id, sample.index, sample.reward, tuple(sample.response_ids), sample.prompt.text


def test_groups_are_made_up_by_all_replicas_and_stay_whole(pool: WorkerPool, tmp_path: Path) -> None:
    options = ["algorithm=dapo", "algorithm.dynamic_sampling.generation_prompts=4"]
    options += ["algorithm.dynamic_sampling.max_generation_batches=0"]
    options += [f"rewards.judges=[{{name: '{__name__}:judge_by_digest'}}]"]
    results = pool.run(watched, world=2, folder=str(tmp_path / "run"), steps=2, overrides=options)
    assert results[0]["found"] == results[1]["found"]
    batches = [len(r["asked"]) for r in results]
    assert batches[0] == batches[1] == sum(m["sampling/batches"] for _, m in results[0]["found"])
    assert max(m["sampling/batches"] for _, m in results[0]["found"]) > 1
    assert all(len(asked) == 8 for r in results for asked in r["asked"])  # two prompts of four samples each, every time
    drawn = [p for r in results for asked in r["asked"] for p in asked]
    assert set(Counter(drawn).values()) == {4}
    seen = set()
    for samples, metrics in results[0]["found"]:
        groups = Counter(prompt for prompt, *_ in samples)
        assert list(groups.values()) == [4] * 4
        assert not seen & set(groups)
        seen |= set(groups)
        rewards = {p: [r for q, _, r, *_ in samples if q == p] for p in groups}
        assert all(len(set(r)) > 1 for r in rewards.values())
        assert [index for _, index, *_ in samples] == [0, 1, 2, 3] * 4
        assert metrics["sampling/groups"] == 4 * metrics["sampling/batches"]
        thrown_away = metrics["tokens/discarded"]
        assert thrown_away < metrics["tokens/generated"]
        assert thrown_away > 0 or metrics["sampling/batches"] == 1


def test_a_step_without_signal_ends_the_run_after_exactly_the_allowed_batches(pool: WorkerPool, tmp_path: Path) -> None:
    judge = f"rewards.judges=[{{name: '{__name__}:judge_none'}}]"
    with pytest.raises(WorkerError, match=r"NoSignalError: 3 batches of 2 .*0 of the 4 .*6 of 6 groups .*100% all 0"):
        launch(pool, tmp_path / "run", *DYNAMIC, judge, "algorithm.dynamic_sampling.max_generation_batches=3")


@pytest.mark.full
def test_a_reward_for_length_alone_is_no_signal_where_the_judge_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    judges = f"rewards.judges=[{{name: '{__name__}:judge_none'}}, {{name: '{__name__}:judge_by_length'}}]"
    options = (judges, "algorithm.dynamic_sampling.max_generation_batches=2", "trainer.steps=1")
    decides = f"algorithm.dynamic_sampling.judge='{__name__}:judge_none'"
    assert launch(pool, tmp_path / "a", *DYNAMIC, *options)[0]["sampling/alike"] < 1
    with pytest.raises(WorkerError, match="NoSignalError: 2 batches"):
        launch(pool, tmp_path / "b", *DYNAMIC, *options, decides)


def test_surplus_groups_are_trained_a_step_later_as_what_they_are(pool: WorkerPool, tmp_path: Path) -> None:
    options = ("algorithm.dynamic_sampling.surplus=keep", "algorithm.correction.weight=token", "rollout.n=8")
    more = ("algorithm.dynamic_sampling.generation_prompts=12", "optimizer.lr=1e-3", "warm_start.steps=20")
    records = launch(pool, tmp_path / "run", *DYNAMIC, *options, *more, "warm_start.batch_size=64")
    assert records[0]["sampling/pending"] > 0
    assert (records[0]["staleness/max"], records[1]["staleness/max"]) == (0, 1)
    assert records[0]["mismatch/kl"] < 1e-9 < 1e-6 < records[1]["mismatch/kl"]  # the policy has moved since
    assert abs(records[0]["correction/weight_mean"] - 1) < 1e-5 < abs(records[1]["correction/weight_mean"] - 1)


def test_the_greedy_response_is_judged_and_not_trained(pool: WorkerPool, tmp_path: Path) -> None:
    options = ["algorithm=remax", "rollout.n=1"]
    results = pool.run(watched, world=2, folder=str(tmp_path / "run"), steps=1, overrides=options)
    (samples, metrics), asked = results[0]["found"][0], results[0]["asked"]
    assert [index for _, index, *_ in samples] == [0] * 4
    assert len(asked[0]) == 4  # two prompts, one drawn and one greedy response each
    assert 0 <= metrics["reward/greedy"] <= 1
    records = launch(pool, tmp_path / "remax", "algorithm=remax", "rollout.n=2", "trainer.export_final=false")
    assert [r["step"] for r in records] == [1, 2, 3]


def test_the_engines_log_probs_spare_the_trainers_pass_and_change_little(pool: WorkerPool, tmp_path: Path) -> None:
    short = ("trainer.steps=1", "trainer.export_final=false")
    ours = launch(pool, tmp_path / "a", *short)[0]
    engines = launch(pool, tmp_path / "b", *short, "algorithm.old_log_probs=engine")[0]
    assert engines["loss/policy"] == pytest.approx(ours["loss/policy"], abs=1e-5)
    assert engines["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert not [key for key in engines if key.startswith("mismatch/")]


def test_passes_over_a_steps_samples_make_their_policy_old(pool: WorkerPool, tmp_path: Path) -> None:
    options = ("trainer.update_epochs=2", "trainer.mini_batch_prompts=2", "algorithm.kl.where=loss")
    steering = ("algorithm.kl.target=0.001", "algorithm.kl.coef=0.5", "optimizer.lr=3e-3", "trainer.export_final=false")
    records = launch(pool, tmp_path / "run", *options, *steering)
    assert [r["updates"] for r in records] == [4, 4, 4]
    assert all(0 < r["ratio/kl"] < r["ratio/kl_last"] for r in records)
    # The divergence is 0 in the first step, and over its target from then on.
    assert [r["kl/coef"] for r in records] == pytest.approx([0.5, 0.5 * 0.98, 0.5 * 0.98 * 1.02])


def test_bfloat16_is_weighted_told_and_repeatable(pool: WorkerPool, tmp_path: Path) -> None:
    options = ("model.dtype=bfloat16", "algorithm.correction.weight=token", "algorithm.correction.reject=token")
    bounds = ("algorithm.correction.reject_low=0.99", "algorithm.correction.reject_high=1.01")
    first = launch(pool, tmp_path / "a", *options, *bounds, "trainer.export_final=false")
    assert all(r["mismatch/logprob_abs_max"] > 1e-3 for r in first)
    assert any(r["correction/rejected"] > 0 for r in first)
    assert all(r["mismatch/ess"] < 1 for r in first)
    second = launch(pool, tmp_path / "b", *options, *bounds, "trainer.export_final=false")
    assert steady(first) == steady(second)
