"""Rows, their fields, and micro-batches made of them."""

import numpy as np
import pytest
import torch

from hybridrl.rollout.samples import Finish, Prompt, Sample
from hybridrl.training.batch import with_weights
from hybridrl.training.microbatch import make_micro_batch
from hybridrl.training.rows import Row, rows_from_examples, rows_from_samples


def make_sample(group, index, prompt, response, reward=0.0, **kwargs):
    return Sample(
        prompt=Prompt(id=group, token_ids=tuple(prompt)),
        index=index,
        response_ids=list(response),
        log_probs=[-0.1 * (i + 1) for i in range(len(response))],
        versions=[0] * len(response),
        finish=Finish.STOP,
        reward=reward,
        **kwargs,
    )


def make_row(index, length, mask=None, **fields):
    mask = [False] + [True] * (length - 1) if mask is None else mask
    return Row(
        index=index,
        token_ids=np.arange(length, dtype=np.int64) + 100 * (index + 1),
        mask=np.array(mask, np.bool_),
        fields={name: np.array(values, np.float32) for name, values in fields.items()},
    )


def test_rows_of_samples_mask_prompts_and_other_peoples_tokens():
    sample = make_sample(0, 0, [5, 6, 7], [1, 2, 9, 9, 9, 9, 3], mask=[True, True, False, False, False, False, True])
    (row,) = rows_from_samples([sample])
    assert row.token_ids.tolist() == [5, 6, 7, 1, 2, 9, 9, 9, 9, 3]
    assert row.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 4 + [True]
    assert row.fields["rollout_log_probs"][3:5].tolist() == pytest.approx([-0.1, -0.2])
    assert row.trained == 3


def test_failed_and_empty_samples_keep_their_place_and_train_nothing():
    samples = [make_sample(0, 0, [5], [1], failed=True), make_sample(0, 1, [5], []), make_sample(0, 2, [5], [2])]
    rows = rows_from_samples(samples)
    assert [row.trained for row in rows] == [0, 0, 1]
    assert [row.index for row in rows] == [0, 1, 2]


def test_truncated_samples_can_be_left_out():
    samples = [make_sample(0, 0, [5], [1]), make_sample(0, 1, [5], [2])]
    samples[1].finish = Finish.LENGTH
    assert [row.trained for row in rows_from_samples(samples)] == [1, 1]
    assert [row.trained for row in rows_from_samples(samples, filter_truncated=True)] == [1, 0]


def test_malformed_rows_are_refused():
    with pytest.raises(ValueError, match=r"row 3 has 2 tokens, but .*mask"):
        Row(index=3, token_ids=np.zeros(2, np.int64), mask=np.zeros(3, np.bool_))
    with pytest.raises(ValueError, match=r"row 1 has 2 tokens, but .*weights"):
        make_row(1, 2, weights=[1.0])
    with pytest.raises(ValueError, match="token 0 is marked"):
        make_row(0, 2, mask=[True, True])
    with pytest.raises(ValueError, match="no tokens"):
        make_row(0, 0, mask=[])


def test_weights_are_taken_over_all_rows_given():
    rows = with_weights([make_row(0, 3), make_row(1, 1), make_row(2, 7)], "seq_mean_token_mean", None)
    assert [float(r.fields["weights"][0]) for r in rows] == pytest.approx([1 / 4, 0, 1 / 12])


def test_a_pack_never_trains_a_row_on_the_next_rows_first_token():
    rows = [make_row(0, 3, weights=[9, 1, 2]), make_row(1, 2, weights=[9, 3])]
    batch = make_micro_batch(rows, [0, 1], ["weights"], packing=True, pad_multiple=4)
    assert batch.tokens.tolist() == [[100, 101, 102, 200, 201, 0, 0, 0]]
    assert batch.labels.tolist() == [[101, 102, 0, 201, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[True, True, False, True, False, False, False, False]]
    assert batch.fields["weights"].tolist() == [[1, 2, 0, 3, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.segments.ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.lengths == (3, 2, 3)
    assert batch.row_lengths == (3, 2)


def test_padded_rows_lie_one_above_the_other():
    rows = [make_row(0, 3, weights=[9, 1, 2]), make_row(1, 2, weights=[9, 3])]
    batch = make_micro_batch(rows, [1, 0], ["weights"], packing=False, pad_multiple=4)
    assert batch.tokens.tolist() == [[200, 201, 0, 0], [100, 101, 102, 0]]
    assert batch.labels.tolist() == [[201, 0, 0, 0], [101, 102, 0, 0]]
    assert batch.fields["weights"].tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.segments.ids.tolist() == [[0, 0, 2, 2], [1, 1, 1, 2]]
    assert batch.lengths is None


@pytest.mark.parametrize("packing", [True, False])
def test_results_return_to_their_rows(packing):
    rows = [make_row(0, 3), make_row(1, 1), make_row(2, 4)]
    batch = make_micro_batch(rows, [2, 0, 1], [], packing=packing, pad_multiple=3)
    found = dict(batch.split(batch.labels))
    for i, row in enumerate(rows):
        assert found[i].tolist() == [0.0, *row.token_ids[1:].tolist()]


@pytest.mark.parametrize("packing", [True, False])
def test_an_empty_micro_batch_trains_nothing(packing):
    batch = make_micro_batch([make_row(0, 3)], [], ["weights"], packing=packing, pad_multiple=2)
    assert batch.tokens.shape == (1, 2)
    assert not batch.mask.any()
    assert batch.fields["weights"].shape == (1, 2)
    assert batch.split(torch.ones(1, 2)) == []


def test_missing_fields_are_named():
    with pytest.raises(KeyError, match=r"lack \['advantages'\].*have \['weights'\]"):
        make_micro_batch([make_row(0, 2, weights=[0, 1])], [0], ["weights", "advantages"], packing=True)


def test_rows_of_demonstrations():
    rows = rows_from_examples([([1, 2, 3], [False, False, True]), ([4, 5], [False, True])])
    assert [(r.index, r.token_ids.tolist(), r.trained) for r in rows] == [(0, [1, 2, 3], 1), (1, [4, 5], 1)]


def test_rows_of_a_pack_are_padded_so_that_context_parallel_ranks_can_share_them():
    rows = [make_row(0, 5), make_row(1, 4), make_row(2, 1)]
    batch = make_micro_batch(rows, (0, 1, 2), (), packing=True, pad_multiple=8, cp=2)
    assert batch.lengths == (8, 4, 4)
    assert batch.starts == ((0, 0), (0, 8), (0, 12))
    assert batch.padding[0].tolist() == [False] * 5 + [True] * 3 + [False] * 5 + [True] * 3
    assert batch.position_ids[0].tolist() == [*range(8), *range(4), *range(4)]
    assert batch.mask[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9, 10]
    values = batch.labels.float()
    assert [out[1:].tolist() for _, out in batch.split(values)] == [row.token_ids[1:].tolist() for row in rows]
