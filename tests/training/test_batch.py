"""Mini-batches and passes over a step's samples, tokens selected for an update, and a step's metrics."""

import numpy as np
import pytest

from hybridrl.config.schema import AlgorithmConfig, Config, CovarianceConfig, TrainerConfig
from hybridrl.training.batch import combine, mini_batches, with_selection
from hybridrl.training.rows import Row


def rows(prompts, n):
    """n rows a prompt; the first token is the prompt's number, the second the sample's."""
    ids = [(p, i) for p in range(prompts) for i in range(n)]
    return [Row(index=k, token_ids=np.array(pair), mask=np.array([False, True])) for k, pair in enumerate(ids)]


def batches(trainer, step=1, prompts=6, n=2):
    return [[tuple(r.token_ids.tolist()) for r in batch] for batch in mini_batches(rows(prompts, n), trainer, step)]


def test_updates_take_whole_groups_in_their_order():
    assert batches(TrainerConfig(prompts_per_step=6)) == [[(p, i) for p in range(6) for i in range(2)]]
    halves = batches(TrainerConfig(prompts_per_step=6, mini_batch_prompts=3))
    assert halves == [[(p, i) for p in part for i in range(2)] for part in ((0, 1, 2), (3, 4, 5))]


def test_rows_of_an_update_are_counted_from_zero():
    for batch in mini_batches(rows(6, 2), TrainerConfig(prompts_per_step=6, mini_batch_prompts=2), 1):
        assert [r.index for r in batch] == [0, 1, 2, 3]


def test_each_pass_takes_every_group_once_and_later_ones_in_their_own_order():
    trainer = TrainerConfig(prompts_per_step=6, mini_batch_prompts=2, update_epochs=3)
    found = batches(trainer)
    assert len(found) == 9
    passes = [[row for batch in found[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert passes[0] == [(p, i) for p in range(6) for i in range(2)]
    assert all(sorted(p) == passes[0] for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert all(batch[k][0] == batch[k + 1][0] for batch in found for k in (0, 2))  # groups stay together
    assert batches(trainer) == found
    assert batches(trainer, step=2)[3:] != found[3:]


def test_rows_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"12 rows are not trainer.prompts_per_step=5 groups"):
        list(mini_batches(rows(6, 2), TrainerConfig(prompts_per_step=5), 1))


def test_tokens_are_selected_over_the_whole_update():
    log_probs = [[-1, -2], [-3, -1, -1]]
    advantages = [[1, 1], [-1, -1, 2]]
    made = [
        Row(
            index=i,
            token_ids=np.zeros(len(p) + 1, np.int64),
            mask=np.array([False] + [True] * len(p)),
            fields={
                "old_log_probs": np.array([np.nan, *p], np.float32),
                "advantages": np.array([np.nan, *a], np.float32),
            },
        )
        for i, (p, a) in enumerate(zip(log_probs, advantages, strict=True))
    ]
    # centred: log-probs .6 -.4 | -1.4 .6 .6, advantages .6 .6 | -1.4 -1.4 1.6: products .36 -.24 | 1.96 -.84 .96
    algorithm = AlgorithmConfig(policy_loss="kl_cov", covariance=CovarianceConfig(fraction=0.4))
    found = [r.fields["selected"][r.mask].tolist() for r in with_selection(made, Config(algorithm=algorithm), 1, 0)]
    assert found == [[0, 0], [1, 0, 1]]
    algorithm = AlgorithmConfig(policy_loss="clip_cov", covariance=CovarianceConfig(fraction=1, low=0.3, high=1))
    found = [r.fields["selected"][r.mask].tolist() for r in with_selection(made, Config(algorithm=algorithm), 1, 0)]
    assert found == [[1, 0], [0, 0, 1]]
    assert with_selection(made, Config(), 1, 0) == made


def test_a_steps_metrics_add_up_or_average_and_tell_the_last_update_apart():
    first = {"tokens/trained": 3.0, "ratio/kl": 0.0, "loss/total": 1.0}
    second = {"tokens/trained": 5.0, "ratio/kl": 0.2, "loss/total": 3.0}
    assert combine([first, second]) == {
        "tokens/trained": 8.0,
        "ratio/kl": 0.1,
        "loss/total": 2.0,
        "updates": 2.0,
        "ratio/kl_last": 0.2,
    }
    assert combine([first]) == {**first, "updates": 1.0}
