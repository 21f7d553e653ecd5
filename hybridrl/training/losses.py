"""What an update minimises: from the algorithm's configuration to a weighted sum over tokens.

Weights are taken over the whole batch (`hybridrl.algorithms.aggregate`), so a loss over one micro-batch is its share of
the whole, and so are the metrics: shares of all micro-batches of all ranks add up to the loss and to each metric.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.kl import KL_ESTIMATORS, k3
from hybridrl.algorithms.policy_losses import POLICY_LOSSES, TokenLoss
from hybridrl.algorithms.segments import Segments
from hybridrl.algorithms.supervised import sft
from hybridrl.config.kinds import REINFORCED
from hybridrl.config.schema import AlgorithmConfig

Shares = tuple[Tensor, dict[str, Tensor]]


class _Described(Protocol):
    """What an update must know of its loss beside its value."""

    @property
    def aggregate(self) -> str:
        """How tokens are weighed: a registered aggregation."""

    @property
    def aggregate_length(self) -> int | None:
        """L of `seq_mean_token_sum_norm`."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that rows must have, `weights` aside."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what it reports."""


class Loss(_Described, Protocol):
    """The loss of one update of a policy."""

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        fields: Mapping[str, Tensor],
        mask: Tensor,
        share: float,
        segments: Segments,
    ) -> Shares:
        """A micro-batch's share of the loss (scalar, differentiable) and of each metric (scalars, detached).

        Args:
            log_probs, entropy: float32, any one shape; of the tokens under the current weights.
            fields: as `log_probs`, `weights` among them; entries outside the mask may hold anything.
            mask: bool, trained tokens.
            share: 1 / trained tokens of the whole batch, for metrics that are means over tokens.
            segments: the response of each token, for losses that look at whole responses.
        """


class ScalarLoss(_Described, Protocol):
    """The loss of one update of a model with a scalar head."""

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], mask: Tensor, share: float, segments: Segments
    ) -> Shares:
        """As `Loss`, of what the model says of each token instead of log-probs and entropy."""


AnyLoss: TypeAlias = Loss | ScalarLoss


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """A policy loss, a KL loss and an entropy bonus, as an algorithm's configuration says."""

    config: AlgorithmConfig
    aggregate_length: int | None = None
    kl_coef: float | None = None
    """Coefficient of the KL loss in place of the configuration's."""

    @property
    def aggregate(self) -> str:
        return self.config.aggregate

    @property
    def fields(self) -> tuple[str, ...]:
        wanted = {
            "ref_log_probs": self.config.kl.where == "loss",
            "importance": self.config.correction.weight != "none",
            "selected": self.selects,
        }
        return ("advantages", "old_log_probs", *(name for name, want in wanted.items() if want))

    @property
    def selects(self) -> bool:
        """Whether the policy loss treats some tokens of the update apart (`selected`)."""
        return "selected" in POLICY_LOSSES.wants(self.config.policy_loss)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss/total", "loss/policy", "loss/kl", "entropy", "ratio/mean", "ratio/clipped", "ratio/kl")

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        fields: Mapping[str, Tensor],
        mask: Tensor,
        share: float,
        segments: Segments,
    ) -> Shares:
        new, entropy, known = _masked(log_probs, entropy, fields, mask)
        algorithm, weights = self.config, known["weights"]
        policy = self._policy(new, known, mask, segments)
        loss = (weights * known.get("importance", 1) * policy.loss).sum()
        metrics = {
            "loss/policy": loss.detach(),
            "entropy": share * entropy.detach().sum(),
            "ratio/mean": share * (policy.ratio * mask).sum(),
            "ratio/clipped": share * (policy.clipped & mask).sum(),
            "ratio/kl": share * k3(known["old_log_probs"], new.detach()).sum(),
        }
        kl_metric = torch.zeros_like(metrics["loss/policy"])
        if algorithm.kl.where == "loss":
            kl = (weights * KL_ESTIMATORS[algorithm.kl.estimator](new, known["ref_log_probs"])).sum()
            loss = loss + (algorithm.kl.coef if self.kl_coef is None else self.kl_coef) * kl
            kl_metric = kl.detach()
        metrics["loss/kl"] = kl_metric
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (weights * entropy).sum()
        metrics["loss/total"] = loss.detach()
        return loss, metrics

    def _policy(self, new: Tensor, known: Mapping[str, Tensor], mask: Tensor, segments: Segments) -> TokenLoss:
        """The registered policy loss, by token."""
        algorithm = self.config
        extra = {"selected": known["selected"] > 0} if self.selects else {}
        found: TokenLoss = POLICY_LOSSES.call(
            algorithm.policy_loss,
            log_probs=new,
            old_log_probs=known["old_log_probs"],
            advantages=known["advantages"],
            mask=mask,
            segments=segments,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            covariance_coef=algorithm.covariance.coef,
            **extra,
        )
        return found


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Negative log-likelihood of demonstrations."""

    aggregate: str = "token_mean"
    aggregate_length: int | None = None
    fields: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("loss/total", "loss/sft", "entropy")

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        fields: Mapping[str, Tensor],
        mask: Tensor,
        share: float,
        segments: Segments,
    ) -> Shares:
        new, entropy, known = _masked(log_probs, entropy, fields, mask)
        loss = (known["weights"] * sft(new)).sum()
        return loss, {
            "loss/sft": loss.detach(),
            "loss/total": loss.detach(),
            "entropy": share * entropy.detach().sum(),
        }


def make_loss(
    algorithm: AlgorithmConfig, max_response_length: int, *, kl_coef: float | None = None
) -> PolicyGradient | Supervised:
    """The loss of `algorithm.name`; ValueError lists the known names. `kl_coef` stands in for `algorithm.kl.coef`."""
    length = max_response_length if algorithm.aggregate_length is None else algorithm.aggregate_length
    if algorithm.name in REINFORCED:
        return PolicyGradient(config=algorithm, aggregate_length=length, kl_coef=kl_coef)
    if algorithm.name == "sft":
        return Supervised(aggregate=algorithm.aggregate, aggregate_length=length)
    raise ValueError(f"algorithm.name={algorithm.name!r} is none of {', '.join(REINFORCED)}, sft")


def _masked(
    log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The inputs with 0 outside the mask, so that nothing there reaches the loss or a gradient, NaN included."""
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    known = {name: torch.where(mask, value, zero) for name, value in fields.items()}
    return torch.where(mask, log_probs, zero), torch.where(mask, entropy, zero), known
