"""The order of examples: complete, repeatable, resumable, and alone with its randomness."""

import json
import random
from collections import Counter

import pytest
import torch

from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.errors import DataError
from hybridrl.data.stream import DemonstrationStream, PromptStream
from hybridrl.rollout.samples import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=index, token_ids=(index,), answer=str(index)) for index in range(count)]


def rows_of(taken: list[Prompt]) -> list[int]:
    return [prompt.token_ids[0] for prompt in taken]


def stream(count: int = 10, batch: int = 4, seed: int = 3, shuffle: bool = True) -> PromptStream:
    return PromptStream(prompts(count), batch=batch, seed=seed, shuffle=shuffle)


def test_without_shuffling_the_order_is_that_of_the_rows_over_borders_too() -> None:
    plain = stream(5, 4, shuffle=False)
    assert [rows_of(plain.next(4)) for _ in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


@pytest.mark.parametrize(("count", "step"), [(10, 4), (10, 5), (7, 3), (8, 8), (5, 1)])
def test_every_row_comes_once_an_epoch(count: int, step: int) -> None:
    shuffled = stream(count, step)
    taken = [row for _ in range(3 * count) for row in rows_of(shuffled.next(step))]
    epochs = [taken[start : start + count] for start in range(0, len(taken), count)]
    assert all(Counter(epoch) == Counter(range(count)) for epoch in epochs if len(epoch) == count)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_step_of_several_epochs() -> None:
    counts = Counter(rows_of(stream(3, 3).next(7)))
    assert sorted(counts.values()) == [2, 2, 3]


def test_ids_never_recur() -> None:
    shuffled = stream(3, 2)
    ids = [prompt.id for _ in range(10) for prompt in shuffled.next(2)]
    assert ids == list(range(20))


def steps(taken_from: PromptStream) -> list[list[int]]:
    return [rows_of(taken_from.next(4)) for _ in range(5)]


def test_the_seed_alone_decides_the_order() -> None:
    random.seed(1)
    first = steps(stream())
    random.seed(2)
    assert steps(stream()) == first
    assert steps(stream(seed=4)) != first


def test_global_generators_are_not_touched() -> None:
    states = random.getstate(), torch.get_rng_state()
    shuffled = stream()
    shuffled.next(25)
    stream().load_state_dict(shuffled.state_dict())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7])
def test_a_resumed_stream_goes_on_with_what_was_not_handed_out(done: int) -> None:
    straight, first = stream(), stream()
    for _ in range(done):
        straight.next(4)
        first.next(4)
    saved = json.loads(json.dumps(first.state_dict()))
    first.next(4)  # read ahead and lost
    resumed = stream()
    resumed.load_state_dict(saved)
    for _ in range(6):
        assert resumed.next(4) == straight.next(4)


@pytest.mark.parametrize("other", [stream(11), stream(seed=9), stream(shuffle=False)])
def test_a_place_in_other_data_is_refused(other: PromptStream) -> None:
    with pytest.raises(DataError, match=r"was .*, is "):
        other.load_state_dict(stream().state_dict())


def test_other_content_of_the_same_size_is_refused() -> None:
    changed = [Prompt(id=index, token_ids=(index,), answer="x") for index in range(10)]
    with pytest.raises(DataError, match="digest"):
        PromptStream(changed, batch=4, seed=3).load_state_dict(stream().state_dict())


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 usable rows, fewer than a batch \(trainer\.prompts_per_step=8\)"):
        stream(3, 8)
    with pytest.raises(DataError, match=r"warm_start\.batch_size=2"):
        DemonstrationStream([Demonstration((1, 2), (False, True))], batch=2, seed=0)
    with pytest.raises(DataError, match="at least 1"):
        stream(3, 0)


def test_demonstrations_stream_alike() -> None:
    examples = [Demonstration((index, 1), (False, True)) for index in range(4)]
    one, other = (DemonstrationStream(examples, batch=2, seed=5) for _ in range(2))
    taken = [one.next(2) for _ in range(4)]
    assert taken == [other.next(2) for _ in range(4)]
    assert sorted(example.token_ids[0] for step in taken[:2] for example in step) == [0, 1, 2, 3]
