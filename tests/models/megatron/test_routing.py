"""The choice of experts and their weights, against transformers' own routers and against the formulas by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from hybridrl.models.megatron import routing
from hybridrl.models.spec import MoeSpec

MOE = MoeSpec(num_experts=4, top_k=2, ffn_size=8, norm_topk_prob=True, layers=(True,))
SIGMOID = dataclasses.replace(MOE, num_experts=16, top_k=4, score_function="sigmoid", correction_bias=True)


@pytest.mark.parametrize(("norm_topk_prob", "weights"), [(False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])])
def test_softmax_weights_with_and_without_renormalisation(norm_topk_prob: bool, weights: list[float]) -> None:
    moe = dataclasses.replace(MOE, norm_topk_prob=norm_topk_prob)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen = routing.choose(logits, moe)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.weigh(logits, chosen, moe)[0], torch.tensor(weights), atol=5e-5, rtol=0)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (4, 2), (4, 3), (8, 2), (2, 1)])
def test_sigmoid_routing_equals_transformers(groups: int, topk_groups: int, norm_topk_prob: bool) -> None:
    """Groups of which k / topk_group is 2, as in DeepSeek-V3, and of which it is not."""
    moe = dataclasses.replace(
        SIGMOID, num_groups=groups, topk_groups=topk_groups, norm_topk_prob=norm_topk_prob, routed_scaling_factor=2.5
    )
    settings: dict[str, Any] = {"n_group": groups, "topk_group": topk_groups, "norm_topk_prob": norm_topk_prob}
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, routed_scaling_factor=2.5, **settings
        )
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        theirs.weight.normal_(0, 0.3, generator=generator)
        theirs.e_score_correction_bias.normal_(0, 0.5, generator=generator)
    hidden = torch.randn(200, 32, generator=generator)
    logits, weights, experts = theirs(hidden)
    ours = logits.detach().requires_grad_()
    chosen = routing.choose(ours.detach(), moe, theirs.e_score_correction_bias)
    expected = torch.zeros(200, 16).scatter(1, experts, weights)
    found = routing.spread(routing.weigh(ours, chosen, moe), chosen, 16)
    torch.testing.assert_close(found, expected)
    assert torch.equal(routing.as_map(chosen, 16), torch.zeros(200, 16).scatter(1, experts, 1.0).bool())
    assert not torch.equal(chosen.sort().values, routing.choose(ours.detach(), moe).sort().values)  # the bias matters
    coefficients = torch.randn(200, 16, generator=generator)
    (gradient,) = torch.autograd.grad((found * coefficients).sum(), ours)
    (theirs_too,) = torch.autograd.grad((expected * coefficients).sum(), theirs.weight)
    torch.testing.assert_close(gradient.t() @ hidden, theirs_too, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("moe", [MOE, SIGMOID])
def test_shares_of_the_balance_loss_sum_to_one(moe: MoeSpec) -> None:
    logits = torch.randn(7, moe.num_experts, generator=torch.Generator().manual_seed(1))
    found = routing.shares(logits, moe)
    torch.testing.assert_close(found.sum(-1), torch.ones(7))
    assert torch.equal(found.argsort(), logits.argsort())
