"""Losses of pairs of responses, and of single ones with a label, from one score a response.

A score is what the loss of a pair compares: with h = chosen - rejected,

- of `dpo`, `cdpo` and `ipo`: the log-ratio, log-prob of the response under the policy minus that under the reference;
- of `simpo`: the mean log-prob of its tokens under the policy;
- of `bradley_terry`: a reward model's.

Log-probs are summed over a response's tokens. Where their means are taken instead, the losses are the length-normalised
ones (Meng et al. 2024, table 3; Lambert et al. 2024, eq. 6).
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.registry import Registry

PairLoss: TypeAlias = Callable[..., Tensor]
"""Takes `chosen` and `rejected` [p], in which it is differentiable, and those that it names of the recipe's `beta`,
`label_smoothing` and `target_margin`; returns [p]."""

PAIR_LOSSES: Registry[PairLoss] = Registry("preference loss of pairs")


@PAIR_LOSSES.register("dpo")
def dpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """-log σ(β·h).

    Source: DPO (Rafailov et al. 2023), eq. 7.
    """
    return -logsigmoid(beta * (chosen - rejected))


@PAIR_LOSSES.register("cdpo")
def cdpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - ε)·log σ(β·h) - ε·log σ(-β·h): DPO where a share ε of the labels is wrong.

    Source: Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO", eq. 3.
    """
    logit = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)


@PAIR_LOSSES.register("ipo")
def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2τ))², τ = beta.

    Source: IPO (Azar et al. 2023), eq. 17.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


@PAIR_LOSSES.register("simpo")
def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, target_margin: float) -> Tensor:
    """-log σ(β·h - γ), γ = target_margin.

    Source: SimPO (Meng et al. 2024), eq. 6.
    """
    return -logsigmoid(beta * (chosen - rejected) - target_margin)


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """-log σ(h - margin) of a reward model's scores [p].

    Sources: Bradley and Terry 1952; InstructGPT (Ouyang et al. 2022), eq. 1; margins, Llama 2 (Touvron et al. 2023),
    eq. 2.
    """
    return -logsigmoid(chosen - rejected - margins)


def kto(
    log_ratios: Tensor,
    desirable: Tensor,
    divergence: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D·(1 - σ(β·(r - z))) of desirable responses, λ_U·(1 - σ(β·(z - r))) of undesirable ones.

    Source: KTO (Ethayarajh et al. 2024), eqs. 7 and 8.

    Args:
        log_ratios: [n]: r, differentiable.
        desirable: [n] bool.
        divergence: scalar or [n]: z, the policy's divergence from the reference, of `kto_divergence`; no gradient flows
            through it.
    """
    gain = beta * (log_ratios - divergence.detach())
    good, bad = desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid()
    return good.where(desirable, bad)


def kto_divergence(log_ratios: Tensor) -> Tensor:
    """The z of `kto`: the mean log-ratio of responses to other prompts than their own, but at least 0; a scalar.

    Source: KTO (Ethayarajh et al. 2024), section 4.1: prompt i with response i + 1 of the batch. `log_ratios` [n].
    """
    return log_ratios.double().mean().clamp(min=0)
