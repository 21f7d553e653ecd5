"""Preferences as rows, and what an update on them minimises.

A pair is two rows of one micro-batch. In every row the fields are alike on all tokens: `pair`, its number in the
update; `side`, 1 for the chosen response and -1 for the rejected one (or for a bad response by itself); `scale`, 1, or
1 / trained tokens where losses are length-normalised; and what else the loss names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.preference_losses import PAIR_LOSSES, bradley_terry, kto
from hybridrl.algorithms.segments import Segments
from hybridrl.config.schema import PreferenceConfig
from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.preferences import Pair, Verdict
from hybridrl.training.losses import Shares
from hybridrl.training.rows import Row

PAIR_METRICS = ("loss/preference", "reward/chosen", "reward/rejected", "reward/margin", "reward/accuracy")


def pair_rows(pairs: Sequence[Pair], *, length_normalized: bool = False, scored: bool = False) -> list[Row]:
    """Chosen and rejected response of each pair, one after the other.

    `scored`: for a reward model, which says what it thinks of a sequence after its last token. The rows then have one
    token more, whose entry is that score, and it alone is trained. Since attention is causal it changes nothing.
    """
    rows: list[Row] = []
    for number, pair in enumerate(pairs):
        for side, response in ((1.0, pair.chosen), (-1.0, pair.rejected)):
            row = _row(len(rows), response, scored)
            scale = 1 / row.trained if length_normalized else 1.0
            fields = {"pair": float(number), "side": side, "scale": scale, "margin": pair.margin}
            rows.append(replace(row.with_fields(**fields), pair=number))
    return rows


def verdict_rows(verdicts: Sequence[Verdict], *, length_normalized: bool = False) -> list[Row]:
    """One row a response."""
    rows = []
    for number, verdict in enumerate(verdicts):
        row = _row(number, verdict.response, scored=False)
        scale = 1 / row.trained if length_normalized else 1.0
        rows.append(row.with_fields(pair=float(number), side=1.0 if verdict.desirable else -1.0, scale=scale))
    return rows


def scored_row(index: int, token_ids: Sequence[int]) -> Row:
    """A sequence as a reward model takes it (see `pair_rows`)."""
    ids = np.asarray([*token_ids, token_ids[-1]], np.int64)
    return Row(index=index, token_ids=ids, mask=np.arange(len(ids)) == len(token_ids))


def _row(index: int, response: Demonstration, scored: bool) -> Row:
    if scored:
        return scored_row(index, response.token_ids)
    ids, mask = np.asarray(response.token_ids, np.int64), np.asarray(response.mask, np.bool_)
    return Row(index=index, token_ids=ids, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The loss of pairs under a policy (`preference.loss` but for `kto`), as a mean over `count` pairs."""

    config: PreferenceConfig
    count: int
    aggregate: str = "token_mean"
    aggregate_length: int | None = None
    metrics: tuple[str, ...] = (*PAIR_METRICS, "entropy")

    @property
    def fields(self) -> tuple[str, ...]:
        return ("pair", "side", "scale", *(() if self.config.loss == "simpo" else ("ref_log_probs",)))

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        fields: Mapping[str, Tensor],
        mask: Tensor,
        share: float,
        segments: Segments,
    ) -> Shares:
        config = self.config
        gains = log_probs if config.loss == "simpo" else log_probs - fields["ref_log_probs"]
        chosen, rejected, here = _by_pair(gains * fields["scale"], fields, mask, self.count)
        loss = PAIR_LOSSES.call(
            config.loss,
            chosen=chosen,
            rejected=rejected,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            target_margin=config.target_margin,
        )
        total, metrics = _mean(loss, config.beta * chosen.detach(), config.beta * rejected.detach(), here)
        return total, metrics | {"entropy": share * torch.where(mask, entropy, 0).detach().sum()}


@dataclass(frozen=True, kw_only=True)
class ScoredPairs:
    """The loss of pairs under a reward model, as a mean over `count` pairs."""

    count: int
    aggregate: str = "token_mean"
    aggregate_length: int | None = None
    fields: tuple[str, ...] = ("pair", "side", "margin")
    metrics: tuple[str, ...] = PAIR_METRICS

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], mask: Tensor, share: float, segments: Segments
    ) -> Shares:
        chosen, rejected, here = _by_pair(values, fields, mask, self.count)
        margins = _total(torch.where(fields["side"] > 0, fields["margin"], 0), fields, mask, self.count)
        return _mean(bradley_terry(chosen, rejected, margins), chosen.detach(), rejected.detach(), here)


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The loss of `kto`, as a mean over `count` responses, of which `desirable` are good."""

    config: PreferenceConfig
    count: int
    desirable: int
    aggregate: str = "token_mean"
    aggregate_length: int | None = None
    fields: tuple[str, ...] = ("pair", "side", "scale", "ref_log_probs", "divergence")
    metrics: tuple[str, ...] = ("loss/preference", "reward/desirable", "reward/undesirable", "entropy")

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        fields: Mapping[str, Tensor],
        mask: Tensor,
        share: float,
        segments: Segments,
    ) -> Shares:
        config, count = self.config, self.count
        ratios = _total((log_probs - fields["ref_log_probs"]) * fields["scale"], fields, mask, count)
        length = _total(torch.ones_like(log_probs), fields, mask, count)
        here = length > 0
        sides, divergence = (
            _total(fields[k], fields, mask, count) / length.clamp(min=1) for k in ("side", "divergence")
        )
        loss = kto(
            ratios,
            sides > 0,
            divergence,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        total = torch.where(here, loss, 0).sum() / count
        rewards, bad = config.beta * ratios.detach(), count - self.desirable
        return total, {
            "loss/preference": total.detach(),
            "reward/desirable": torch.where(sides > 0, rewards, 0).sum() / max(1, self.desirable),
            "reward/undesirable": torch.where(sides < 0, rewards, 0).sum() / max(1, bad),
            "entropy": share * torch.where(mask, entropy, 0).detach().sum(),
        }


def _total(values: Tensor, fields: Mapping[str, Tensor], mask: Tensor, count: int) -> Tensor:
    """[count] float64: sums over the tokens of each pair (or response). Nothing outside the mask counts."""
    place = torch.where(mask, fields["pair"], 0).long().flatten()
    kept = torch.where(mask, values, 0).flatten().double()
    return kept.new_zeros(count).index_add(0, place, kept)


def _by_pair(values: Tensor, fields: Mapping[str, Tensor], mask: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the chosen and the rejected responses [count] float64, and which pairs are in this micro-batch."""
    chosen = _total(torch.where(fields["side"] > 0, values, 0), fields, mask, count)
    rejected = _total(torch.where(fields["side"] < 0, values, 0), fields, mask, count)
    return chosen, rejected, _total(torch.ones_like(values), fields, mask, count) > 0


def _mean(loss: Tensor, chosen: Tensor, rejected: Tensor, here: Tensor) -> Shares:
    """This micro-batch's share of the mean loss, and of its metrics."""
    share = here / len(here)
    total = (share * loss).sum()
    measured = (total.detach(), *((share * x).sum() for x in (chosen, rejected, chosen - rejected, chosen > rejected)))
    return total, dict(zip(PAIR_METRICS, measured, strict=True))
