"""Rewards of responses by the group (the prompt) that each belongs to: counts, sums, and whether they differ at all."""

import torch
from torch import Tensor


class Groups:
    """Statistics of groups of responses. Sums are float64.

    Args:
        rewards: [n], float.
        group_ids: [n], integer; responses with one id are a group, wherever they stand.
        valid: [n] bool; the rest (a failed judge) is outside all statistics. None: all are valid.

    Raises ValueError for mismatched shapes, or a valid reward that is not finite.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> None:
        valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
        _check(rewards, group_ids, valid)
        self.valid = valid
        self.rewards = torch.where(valid, rewards, 0).double()
        """[n] float64; 0 where not valid."""
        _, self.index = torch.unique(group_ids, return_inverse=True)
        """[n] int64: the group of each response, 0 to number - 1."""
        self.number = int(self.index.max()) + 1 if len(self.index) else 0

    def total(self, values: Tensor) -> Tensor:
        """[groups] float64: sums of [n] over the valid responses."""
        kept = torch.where(self.valid, values.double(), 0)
        return kept.new_zeros(self.number).index_add(0, self.index, kept)

    @property
    def counts(self) -> Tensor:
        """[groups] float64: valid responses."""
        return self.total(torch.ones_like(self.rewards))

    @property
    def means(self) -> Tensor:
        """[groups] float64: mean reward; 0 without a valid response."""
        return self.total(self.rewards) / self.counts.clamp(min=1)

    def centred(self, baselines: Tensor) -> Tensor:
        """[n] float64: reward minus its group's baseline [groups]; exactly 0 where not valid or without signal."""
        kept = self.valid & self.differ()[self.index]
        return torch.where(kept, self.rewards - baselines[self.index], 0)

    def differ(self, tolerance: float = 0.0) -> Tensor:
        """[groups] bool: whether the rewards differ by more than `tolerance` and the rounding of float32."""
        inf = float("inf")
        start = self.rewards.new_full((self.number,), -inf)
        high = start.scatter_reduce(0, self.index, torch.where(self.valid, self.rewards, -inf), "amax")
        low = (-start).scatter_reduce(0, self.index, torch.where(self.valid, self.rewards, inf), "amin")
        resolution = 4 * torch.finfo(torch.float32).eps * torch.maximum(high.abs(), low.abs())
        return high - low > resolution.clamp(min=tolerance)


def _check(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> None:
    if not rewards.shape == group_ids.shape == valid.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)} and valid {tuple(valid.shape)} "
            "must be vectors of one length"
        )
    bad = (~torch.isfinite(rewards) & valid).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards at {bad} are not finite: {rewards[bad].tolist()}; mark failed samples invalid instead"
        )
