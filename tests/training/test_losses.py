"""The loss of an update: what it is made of, and that it does not depend on how the batch is cut or padded."""

import numpy as np
import pytest
import torch

from hybridrl.algorithms.policy_losses import POLICY_LOSSES
from hybridrl.algorithms.segments import Segments
from hybridrl.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig
from hybridrl.training.batch import with_weights
from hybridrl.training.losses import make_loss
from hybridrl.training.microbatch import make_micro_batch
from hybridrl.training.rows import Row

FIELDS = ("advantages", "old_log_probs", "ref_log_probs", "importance", "selected")


def make_rows(seed=0, masks=None):
    rng = np.random.default_rng(seed)
    lengths = [4, 2, 7, 1, 5]
    masks = masks or [[False] + [bool(b) for b in rng.random(n - 1) < 0.7] for n in lengths]
    return [
        Row(
            index=i,
            token_ids=rng.integers(0, 9, n),
            mask=np.array(masks[i]),
            fields={name: rng.normal(size=n).astype(np.float32) for name in FIELDS},
        )
        for i, n in enumerate(lengths)
    ]


def everything(aggregate="token_mean", policy_loss="ppo_clip"):
    return AlgorithmConfig(
        policy_loss=policy_loss,
        aggregate=aggregate,
        dual_clip=2.0,
        entropy_coef=0.01,
        kl=KlConfig(where="loss", coef=0.1, estimator="k3"),
        correction=CorrectionConfig(weight="token"),
    )


def run(rows, loss, cut, packing, table, poison=None):
    """Sum of shares over the micro-batches of a cut, and its gradient by `table` [9, 9] of bigram log-probs."""
    rows = with_weights(rows, loss.aggregate, loss.aggregate_length)
    share = 1 / max(1, sum(r.trained for r in rows))
    table = table.clone().requires_grad_()
    total, sums = torch.zeros(()), {}
    for indices in cut:
        batch = make_micro_batch(rows, indices, (*loss.fields, "weights"), packing=packing, pad_multiple=3)
        logits = table[batch.tokens]
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, batch.labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        fields = batch.fields
        if poison is not None:
            log_probs, entropy = (torch.where(batch.mask, x, poison) for x in (log_probs, entropy))
            fields = {k: torch.where(batch.mask, v, torch.full_like(v, poison)) for k, v in fields.items()}
        part, metrics = loss(log_probs, entropy, fields, batch.mask, share, batch.segments)
        total = total + part
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    total.backward()
    return total.item(), table.grad, sums


@pytest.mark.parametrize(
    ("aggregate", "policy_loss"),
    [
        *((name, "ppo_clip") for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")),
        *(("seq_mean_token_mean", name) for name in POLICY_LOSSES if name != "ppo_clip"),
    ],
)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("cut", [[[0], [1], [2], [3], [4]], [[4, 1], [3], [], [2, 0]]])
def test_shares_add_up_to_the_same_loss_gradient_and_metrics(aggregate, policy_loss, packing, cut):
    loss = make_loss(everything(aggregate, policy_loss), 16)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    value, gradient, metrics = run(make_rows(), loss, [[0, 1, 2, 3, 4]], True, table)
    cut_value, cut_gradient, cut_metrics = run(make_rows(), loss, cut, packing, table)
    assert cut_value == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-5, atol=1e-7)
    assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("policy_loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_nothing_outside_the_mask_reaches_the_loss_or_the_gradient(poison, policy_loss):
    loss = make_loss(everything(policy_loss=policy_loss), 16)
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    clean = run(make_rows(), loss, [[0, 1, 2, 3, 4]], True, table)
    dirty = run(make_rows(), loss, [[0, 1, 2, 3, 4]], True, table, poison)
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_batch_without_trained_tokens_has_zero_loss_and_gradient(name):
    algorithm = everything()
    algorithm.name = name
    rows = make_rows(masks=[[False] * n for n in [4, 2, 7, 1, 5]])
    value, gradient, metrics = run(rows, make_loss(algorithm, 16), [[0, 1], [2, 3, 4]], True, torch.zeros(9, 9))
    assert value == 0
    assert not gradient.any()
    assert set(metrics.values()) == {0.0}


def test_on_policy_gradient_is_the_advantage_weighted_score():
    loss = make_loss(AlgorithmConfig(), 16)
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    fields = {
        "advantages": torch.tensor([2.0, -1.0]),
        "old_log_probs": log_probs.detach().clone(),
        "weights": torch.tensor([0.5, 0.5]),
    }
    value, metrics = loss(
        log_probs, torch.ones(2), fields, torch.tensor([True, True]), 0.5, Segments(torch.tensor([0, 0]), 1)
    )
    value.backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.0, 0.5])
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {
            "loss/policy": -0.5,
            "loss/total": -0.5,
            "loss/kl": 0,
            "entropy": 1,
            "ratio/mean": 1,
            "ratio/clipped": 0,
            "ratio/kl": 0,
        }
    )


def test_reference_log_probs_are_asked_for_only_by_a_kl_loss():
    assert "ref_log_probs" in make_loss(everything(), 16).fields
    assert make_loss(AlgorithmConfig(), 16).fields == ("advantages", "old_log_probs")
    assert make_loss(AlgorithmConfig(name="sft"), 16).fields == ()


def test_unknown_algorithms_are_named():
    with pytest.raises(ValueError, match=r"algorithm.name='dqn' is none of grpo, ppo, distill, sft"):
        make_loss(AlgorithmConfig(name="dqn"), 16)
