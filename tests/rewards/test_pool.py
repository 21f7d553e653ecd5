"""The judge pool: whatever a judge does costs its own sample, and the pool stays whole."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.rewards.pool import Job, JudgePool
from tests.processes import left_of, runs

BAD = ("tests.rewards.bad_judges:obey", {})
REPOSITORY = Path(__file__).parents[2]


def make(size: int = 2, timeout_s: float = 5.0, batch_timeout_s: float = 60.0, memory_mb: int = 512) -> JudgePool:
    return JudgePool([BAD], size=size, timeout_s=timeout_s, batch_timeout_s=batch_timeout_s, memory_mb=memory_mb)


def jobs(*responses: str) -> list[Job]:
    return [Job(0, response, None) for response in responses]


@pytest.fixture(scope="module")
def shared() -> Iterator[JudgePool]:
    with make() as pool:
        yield pool


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("raise:x", "exception"),
        ("sys_exit:", "exception"),
        ("os_exit:", "died"),
        ("segfault:", "died"),
        (f"memory:{4 * 2**30}", "memory"),
        ("none:", "missing"),
        ("nan:", "invalid"),
        ("text:", "invalid"),
        ("no_score:", "invalid"),
        ("hang:", "timeout"),
        ("ignore_termination:", "timeout"),
        ("kill_group:", "died"),
        ("close_all:", "died"),
    ],
)
def test_each_failure_is_told_by_kind_and_the_next_job_is_unharmed(shared: JudgePool, command: str, kind: str) -> None:
    failed, good = shared.run(jobs(command, "four"))
    assert (failed.scores, failed.kind) == (None, kind)
    assert failed.reason
    assert good.scores == {"score": 4.0}
    assert len(shared.pids) == 2


def test_numbers_of_all_kinds_are_scores(shared: JudgePool) -> None:
    plain, true, several, printed, numpy = shared.run(jobs("abc", "true:", "dict:", "print:", "numpy:"))
    assert plain.scores == {"score": 3.0}
    assert true.scores == {"score": 1.0}
    assert several.scores == {"score": 0.5, "format": 1.0}
    assert printed.scores == {"score": 1.0}
    assert numpy.scores == {"score": 1.0, "part": 0.5}


def test_workers_do_not_import_torch(shared: JudgePool) -> None:
    assert shared.run(jobs("modules:"))[0].scores == {"score": 0.0}


def test_hanging_jobs_do_not_drain_the_pool() -> None:
    with make(size=2, timeout_s=3.0, batch_timeout_s=200.0) as pool:
        verdicts = pool.run(jobs(*["hang:"] * 4, "good"))
        assert [verdict.kind for verdict in verdicts] == ["timeout"] * 4 + [""]
        assert len(pool.pids) == 2
        assert all(runs(pid) for pid in pool.pids)
        assert pool.run(jobs("good", "again"))[1].scores == {"score": 5.0}


def test_the_batch_is_bounded_and_the_next_batch_is_judged() -> None:
    with make(size=1, timeout_s=500.0, batch_timeout_s=5.0) as pool:
        verdicts = pool.run(jobs("ab", "hang:", *["abc"] * 5))
        assert [verdict.kind for verdict in verdicts] == ["", *["batch_timeout"] * 6]
        pool._batch_timeout_s = 60.0
        assert pool.run(jobs("abcd"))[0].scores == {"score": 4.0}


def test_a_judge_that_holds_the_interpreter_lock_is_killed() -> None:
    with make(size=1, timeout_s=3.0) as pool:
        assert [verdict.kind for verdict in pool.run(jobs("hold_lock:", "ok"))] == ["timeout", ""]


def test_what_a_judge_started_is_killed_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with make(size=1) as pool:
        assert pool.run(jobs(f"fork_and_hang:{note}"))[0].kind == "timeout"
        assert left_of([int(note.read_text())]) == []


def test_a_process_that_a_judge_forked_has_no_say_about_other_samples() -> None:
    with make(size=1) as pool:
        verdicts = pool.run(jobs("fork_and_return:", *["four"] * 5))
        assert [verdict.scores for verdict in verdicts] == [{"score": 1.0}, *[{"score": 4.0}] * 5]


def test_metadata_that_cannot_be_sent_costs_its_own_sample(shared: JudgePool) -> None:
    bad, good = shared.run([Job(0, "a", None, {"lock": threading.Lock()}), Job(0, "ab", None, {"n": 1})])
    assert bad.kind == "unsendable"
    assert good.scores == {"score": 2.0}


def test_what_a_judge_left_behind_does_not_cost_the_next_sample() -> None:
    with make(size=1) as pool:
        assert [verdict.kind for verdict in pool.run(jobs("bomb:0.3", "sleep:0.8", "ok"))] == [""] * 3


def test_large_texts_pass(shared: JudgePool) -> None:
    assert shared.run(jobs("x" * 5_000_000))[0].scores == {"score": 5e6}


def test_no_jobs_are_no_work(shared: JudgePool) -> None:
    assert shared.run([]) == []


def test_threads_may_share_a_pool(shared: JudgePool) -> None:
    results: dict[int, float] = {}

    def judge(length: int) -> None:
        verdict = shared.run(jobs("y" * length))[0]
        results[length] = (verdict.scores or {})["score"]

    threads = [threading.Thread(target=judge, args=(length,)) for length in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {length: float(length) for length in range(1, 6)}


def test_a_pool_started_in_a_thread_that_ended_still_judges() -> None:
    pool = make(size=1)
    thread = threading.Thread(target=pool.start)
    thread.start()
    thread.join()
    try:
        assert pool.run(jobs("abc"))[0].scores == {"score": 3.0}
    finally:
        pool.close()


def test_close_ends_all_workers_and_a_closed_pool_refuses() -> None:
    pool = make()
    pool.start()
    pids = pool.pids
    pool.close()
    assert left_of(pids) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(jobs("a"))


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (("nonsense", {}), "exact, numeric, math, reasoning_gym, or module:function"),
        (("no_such_module_here:f", {}), "cannot be imported"),
        (("tests.rewards.bad_judges:absent", {}), "absent"),
        (("exact", {"case": 1}), "unexpected keyword argument 'case'"),
    ],
)
def test_a_judge_that_cannot_be_had_is_refused_at_the_start(judge: tuple[str, dict[str, int]], message: str) -> None:
    pool = JudgePool([judge], size=1, timeout_s=1, batch_timeout_s=10, memory_mb=512)
    with pytest.raises(ValueError, match=message):
        pool.start()
    assert pool.pids == []


@pytest.mark.parametrize("busy", [False, True])
def test_workers_do_not_outlive_a_killed_trainer(tmp_path: Path, busy: bool) -> None:
    script = f"""
        import threading, time
        from pathlib import Path
        from hybridrl.rewards.pool import Job, JudgePool
        pool = JudgePool([({BAD[0]!r}, {{}})], size=2, timeout_s=500, batch_timeout_s=500, memory_mb=512)
        pool.start()
        if {busy}:
            jobs = [Job(0, "hold_lock:", None), Job(0, "fork_and_hang:{tmp_path}/pid", None)]
            threading.Thread(target=pool.run, args=(jobs,), daemon=True).start()
            note = Path("{tmp_path}/pid")
            while not (note.exists() and note.read_text()):
                time.sleep(0.05)
        print(*pool.pids, flush=True)
        time.sleep(600)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    if busy:
        pids.append(int((tmp_path / "pid").read_text()))
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert left_of(pids) == []
