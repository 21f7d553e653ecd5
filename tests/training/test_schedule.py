"""Micro-batch schedules: what always holds, on the inputs that broke others and on random ones."""

import random

import pytest

from hybridrl.training.schedule import schedule


def check(lengths, plan, *, ranks, max_tokens, packing, max_rows=None, pad_multiple=1, count_multiple=1):
    """The promises of the module, restated without its code."""
    assert len(plan.micro_batches) == ranks
    assert {len(steps) for steps in plan.micro_batches} == {plan.steps}
    assert plan.steps % count_multiple == 0
    assert plan.steps >= 1
    placed = [i for steps in plan.micro_batches for rows in steps for i in rows]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in (rows for steps in plan.micro_batches for rows in steps if rows):
        sizes = [lengths[i] for i in rows]
        tokens = -(-sum(sizes) // pad_multiple) * pad_multiple
        if not packing:
            tokens = len(sizes) * -(-max(sizes) // pad_multiple) * pad_multiple
        assert tokens <= max_tokens
        assert max_rows is None or len(rows) <= max_rows


def test_rows_that_do_not_pair_get_a_micro_batch_each():
    plan = schedule([7] * 8, ranks=1, max_tokens=8, packing=True)
    check([7] * 8, plan, ranks=1, max_tokens=8, packing=True)
    assert plan.steps == 8


def test_a_row_over_the_budget_is_named_with_the_option():
    with pytest.raises(ValueError, match=r"1 of 3 rows .*max_tokens_per_micro_batch=8 .*row 1 has 9; raise it to 9"):
        schedule([3, 9, 8], ranks=2, max_tokens=8, packing=True)
    with pytest.raises(ValueError, match=r"multiple of 4\): row 0 has 9; raise it to 12"):
        schedule([9], ranks=1, max_tokens=11, packing=False, pad_multiple=4)


def test_batch_that_ranks_do_not_divide():
    plan = schedule([4, 4, 4, 4, 4], ranks=4, max_tokens=4, packing=True)
    check([4] * 5, plan, ranks=4, max_tokens=4, packing=True)
    assert plan.steps == 2
    assert sum(not rows for steps in plan.micro_batches for rows in steps) == 3


def test_ranks_with_few_rows_get_empty_micro_batches():
    lengths = [8, 8, 8, 1, 1]
    plan = schedule(lengths, ranks=2, max_tokens=8, packing=True)
    check(lengths, plan, ranks=2, max_tokens=8, packing=True)


def test_fewer_rows_than_ranks_and_no_rows():
    check([3], schedule([3], ranks=4, max_tokens=8, packing=True), ranks=4, max_tokens=8, packing=True)
    assert schedule([], ranks=2, max_tokens=8, packing=True).micro_batches == (((),), ((),))


def test_interleaved_stages_round_the_count_up():
    plan = schedule([8] * 5, ranks=1, max_tokens=8, packing=True, count_multiple=2)
    assert plan.steps == 6


def test_tokens_are_balanced_over_ranks():
    rng = random.Random(0)
    lengths = [rng.randint(1, 1000) for _ in range(512)]
    plan = schedule(lengths, ranks=8, max_tokens=4096, packing=True)
    loads = [sum(lengths[i] for rows in steps for i in rows) for steps in plan.micro_batches]
    assert max(loads) - min(loads) <= 0.01 * max(loads)
    assert plan.steps <= 1 + -(-max(loads) // 4096)


@pytest.mark.parametrize("seed", range(200))
def test_promises_hold_for_random_batches(seed):
    rng = random.Random(seed)
    options = {
        "ranks": rng.randint(1, 5),
        "max_tokens": rng.randint(24, 64),
        "packing": rng.random() < 0.5,
        "max_rows": rng.choice([None, 1, 2, 3]),
        "pad_multiple": rng.choice([1, 2, 4]),
        "count_multiple": rng.choice([1, 2, 3]),
    }
    lengths = [rng.randint(1, 24) for _ in range(rng.randint(0, 40))]
    plan = schedule(lengths, **options)
    check(lengths, plan, **options)
    assert plan == schedule(lengths, **options)


PAIRS = [[0, 3], [1, 2], [4, 5], [6]]


@pytest.mark.parametrize(("packing", "budget"), [(True, 17), (False, 20), (True, 100)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_that_belong_together_share_a_micro_batch(packing, budget, ranks):
    lengths = [9, 2, 7, 8, 3, 3, 5]
    options = {"ranks": ranks, "max_tokens": budget, "packing": packing}
    plan = schedule(lengths, together=PAIRS, **options)
    check(lengths, plan, **options)
    homes = {i: (rank, step) for rank, s in enumerate(plan.micro_batches) for step, rows in enumerate(s) for i in rows}
    for group in PAIRS:
        assert len({homes[i] for i in group}) == 1


def test_rows_that_belong_together_and_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"1 of 2 groups of rows .*rows \(0, 1\) have 11; raise it to 11"):
        schedule([5, 6, 3], ranks=1, max_tokens=10, packing=True, together=[[0, 1], [2]])
    with pytest.raises(ValueError, match=r"micro_batch_size=1 cannot hold rows \(0, 1\)"):
        schedule([5, 6], ranks=1, max_tokens=100, packing=True, together=[[0, 1]], max_rows=1)
    with pytest.raises(ValueError, match="do not hold each of 3 rows once"):
        schedule([5, 6, 3], ranks=1, max_tokens=100, packing=True, together=[[0, 1]])


def test_context_parallel_ranks_share_a_larger_micro_batch_of_padded_rows():
    plan = schedule([5, 5, 5], ranks=1, max_tokens=8, packing=True, pad_multiple=4, cp=2)  # 8 of 16 tokens each
    assert plan.steps == 2
    assert sorted(map(len, plan.micro_batches[0])) == [1, 2]
    assert schedule([15], ranks=1, max_tokens=8, packing=True, pad_multiple=4, cp=2).steps == 1
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=8 · parallel.cp=2 .*raise it to 10"):
        schedule([17], ranks=1, max_tokens=8, packing=True, pad_multiple=4, cp=2)
