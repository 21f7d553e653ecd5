"""All or nothing: a fault on one rank leaves the old weights in service or none, on all ranks, and never hangs them."""

import pytest

from tests.distributed import reshard_faults
from tests.distributed.reshard_runs import TRANSPORTS


def told(pool, function, **options):
    """What all ranks were told; they must have been told the same."""
    texts = pool.run(function, world=4, **options)
    assert len(set(texts)) == 1, texts
    return texts[0]


def test_a_parameter_with_other_storage_is_refused_and_the_old_version_stays(pool):
    text = told(pool, reshard_faults.other_storage)
    assert "rank 1" in text
    assert "was given another storage" in text
    assert "rank 0" not in text


def test_released_storage_is_found_and_may_come_back_elsewhere(pool):
    assert "wake its owner first" in pool.run(reshard_faults.released_storage, world=4)[0]


@pytest.mark.parametrize(("step", "number"), [("pack", 0), ("pack", 3), ("unpack", 2)])
def test_an_error_within_a_round_takes_the_weights_out_of_service_everywhere(pool, step, number):
    text = told(pool, reshard_faults.failure_in_a_round, step=step, number=number)
    assert "half-written and not in service" in text
    assert "rank 2: RuntimeError" in text
    assert "rank 1" not in text


def test_ranks_that_mean_different_versions_do_not_start(pool):
    texts = pool.run(reshard_faults.different_versions, world=4)
    assert all("{0: 2, 1: 1, 2: 1, 3: 1}" in text for text in texts)


def test_a_wrong_shape_on_one_rank_stops_all_before_anything_is_sent(pool):
    text = told(pool, reshard_faults.wrong_shape)
    assert "rank 3" in text
    assert "has shape [3, 5]" in text


def test_layouts_without_a_plan_are_told_with_the_tensors_names(pool):
    assert "experts.0.gate_proj" in told(pool, reshard_faults.no_such_plan)


def test_ranks_with_different_settings_do_not_start(pool):
    assert "planned another reshard" in told(pool, reshard_faults.different_settings)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_given_up_and_no_later_sync_is_believed(pool, transport):
    (text, later), *others = pool.run(reshard_faults.late_rank, world=4, transport=transport)
    assert others == [[text, later]] * 3
    assert "half-written and not in service" in text
    assert "rank 1: OSError: lost the network" in text
    assert "rank 2: TransportError: the exchange with the other ranks failed" in text
    assert "rank 2: " in later
    assert "the exchange with the other ranks failed" in later


@pytest.mark.parametrize("round_number", [1, -1])
def test_a_rank_that_comes_too_late_is_told_with_the_others(pool, round_number):
    text = told(pool, reshard_faults.slow_rank, round_number=round_number)
    assert "rank 0: TransportError: the exchange with the other ranks failed: ranks [2] did not come to it" in text
    assert "rank 2: " in text


@pytest.mark.parametrize("where", ["give", "see"])
def test_ranks_that_cannot_share_memory_use_gloo(pool, where):
    assert all(pool.run(reshard_faults.no_shared_memory, world=4, where=where))


def test_memory_that_is_missing_for_staging_is_told_before_anything_is_sent(pool):
    text = told(pool, reshard_faults.no_memory_for_staging)
    assert "rank 1: no " in text
    assert "bytes of shared memory for staging: no space left on device" in text


def test_closed_syncs_leave_no_descriptors(pool):
    assert pool.run(reshard_faults.descriptors, world=4) == [0] * 4


def test_a_flipped_bit_is_found_by_the_checksums(pool):
    text = told(pool, reshard_faults.corrupted)
    assert "rank 3: ChecksumError" in text
    assert "differs from what rank" in text


def test_derived_state_is_rebuilt_after_each_sync_by_its_hook(pool):
    text = told(pool, reshard_faults.derived_state)
    assert "must be rebuilt by the hook sum_norms, which is missing" in text
    assert "rank 2: RuntimeError: no memory for norms" in text
