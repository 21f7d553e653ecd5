"""Which positions context-parallel ranks hold: each once, and alike in work."""

import pytest

from hybridrl.parallel.zigzag import chunks, padded_length, spans


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_position_is_on_one_rank_and_ranks_see_equally_many_keys(ranks: int) -> None:
    length = 12 * ranks
    held = [[p for start, stop in spans(length, rank, ranks) for p in range(start, stop)] for rank in range(ranks)]
    assert sorted(p for own in held for p in own) == list(range(length))
    assert {len(own) for own in held} == {12}
    assert len({sum(p + 1 for p in own) for own in held}) == 1
    assert sorted(chunk for rank in range(ranks) for chunk in chunks(rank, ranks)) == list(
        range(max(2 * ranks, 2) - (ranks == 1))
    )


def test_a_rank_holds_a_chunk_from_the_front_and_one_from_the_back() -> None:
    assert spans(8, 0, 2) == ((0, 2), (6, 8))
    assert spans(8, 1, 2) == ((2, 4), (4, 6))
    assert spans(7, 0, 1) == ((0, 7),)


def test_lengths_that_ranks_cannot_share_are_refused_and_padded() -> None:
    with pytest.raises(ValueError, match="6 tokens over 2 context-parallel ranks: no multiple of 4"):
        spans(6, 0, 2)
    assert [padded_length(n, 2) for n in (1, 4, 5)] == [4, 4, 8]
    assert [padded_length(n, 1) for n in (1, 4, 5)] == [1, 4, 5]
