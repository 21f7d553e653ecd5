"""Token weights: the sheet of loss modes, in value and gradient, however the batch is cut, ordered and padded."""

import itertools

import pytest
import torch

from hybridrl.algorithms.aggregate import AGGREGATES, token_weights

SEQUENCES = [[4.0], [0.0, 0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
MODES = {
    "token_mean": 1.25,
    "seq_mean_token_mean": 1.75,
    "seq_mean_token_sum": 2.5,
    "seq_mean_token_sum_norm": 0.25,
}


def cut_and_sum(mode, sequences, micro_batch, ranks, pad=0):
    """The loss and d loss / d scale, over `ranks` that each take every ranks-th sequence in micro-batches."""
    weights = token_weights(mode, torch.tensor([len(s) for s in sequences]), 10)
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for rank in range(ranks):
        mine = list(range(len(sequences)))[rank::ranks]
        for chunk in (mine[i : i + micro_batch] for i in range(0, len(mine), micro_batch)):
            width = max(len(sequences[i]) for i in chunk) + pad
            losses = torch.full((len(chunk), width), 1e9, dtype=torch.float64)
            token_weight = torch.zeros_like(losses)
            for row, i in enumerate(chunk):
                losses[row, : len(sequences[i])] = torch.tensor(sequences[i], dtype=torch.float64)
                token_weight[row, : len(sequences[i])] = weights[i]
            (token_weight * losses * scale).sum().backward()
    return scale.grad.item()  # the loss is linear in the scale, so this is its value too


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pad", [0, 5])
def test_modes_do_not_depend_on_the_cut(mode, micro_batch, ranks, pad):
    for order in itertools.permutations(SEQUENCES):
        assert cut_and_sum(mode, list(order), micro_batch, ranks, pad) == pytest.approx(MODES[mode])


def test_token_mean_is_no_mean_of_means():
    sequences = [[1.0, 1.0], [3.0] * 6]
    assert cut_and_sum("token_mean", sequences, 1, 2) == pytest.approx(2.5)


@pytest.mark.parametrize("mode", MODES)
def test_responses_without_trained_tokens_count_nowhere(mode):
    plain = token_weights(mode, torch.tensor([1, 3]), 10)
    assert token_weights(mode, torch.tensor([1, 0, 3, 0]), 10).tolist() == [plain[0], 0, plain[1], 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_batch_without_trained_tokens_weighs_nothing(mode, lengths):
    assert token_weights(mode, torch.tensor(lengths, dtype=torch.long), 10).tolist() == [0.0] * len(lengths)


def test_wrong_modes_are_named():
    with pytest.raises(ValueError, match="no loss aggregation is named 'mean'"):
        token_weights("mean", torch.tensor([1]))
    with pytest.raises(ValueError, match="aggregate_length"):
        token_weights("seq_mean_token_sum_norm", torch.tensor([1]), None)
    assert set(MODES) == set(AGGREGATES)
