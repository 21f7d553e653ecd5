"""Seeds are distinct, repeatable and bounded; uniform streams depend on seed and position alone."""

import random

import numpy as np
import pytest
import torch

from hybridrl.rollout.seeds import UniformStream, sample_seed


def test_seeds_are_distinct_over_runs_steps_prompts_and_samples() -> None:
    seeds = {
        sample_seed(run, step, prompt, index)
        for run in (0, 1)
        for step in range(5)
        for prompt in (*range(40), 10**12)
        for index in range(8)
    }
    assert len(seeds) == 2 * 5 * 41 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process() -> None:
    assert sample_seed(0, 0, 0, 0) == sample_seed(0, 0, 0, 0)
    assert sample_seed(42, 7, 3, 1) == 4077403240276506611


def test_seeds_have_no_room_for_what_they_would_cut_off() -> None:
    with pytest.raises(ValueError, match=r"prompt 18446744073709551616"):
        sample_seed(0, 0, 2**64, 0)


def test_a_stream_is_read_in_any_order() -> None:
    stream = UniformStream(5)
    forward = [stream[i] for i in range(600)]
    order = list(range(600))
    random.Random(0).shuffle(order)
    assert [UniformStream(5)[i] for i in (0, 255, 256, 599)] == [forward[i] for i in (0, 255, 256, 599)]
    assert [stream[i] for i in order] == [forward[i] for i in order]
    assert all(0 <= u < 1 for u in forward)
    assert len(set(forward)) == 600


def test_streams_of_different_seeds_differ() -> None:
    firsts = {UniformStream(sample_seed(0, 0, 0, i))[0] for i in range(100)}
    assert len(firsts) == 100


def test_a_stream_leaves_global_random_states_alone() -> None:
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    state = random.getstate()
    UniformStream(1)[300]
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert random.getstate() == state


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        UniformStream(seed)
