"""Sizes of the engine: replicas of `tp` ranks, and how each kind of weight is cut within one. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RolloutSizes:
    """SGLang's own sizes (`tp_size`, `dp_size`, `ep_size`, `moe_dp_size` and switches), for `world / tp` replicas.

    With `dp` > 1 attention is data parallel: cut over `tp / dp` ranks and replicated `dp` times within the replica.
    Experts are spread over `ep` ranks and each cut over `tp / ep / moe_dp`.

    Raises ValueError with every reason why the sizes make no engine.
    """

    world: int
    tp: int = 1
    dp: int = 1
    ep: int = 1
    moe_dp: int = 1
    moe_dense_tp: int | None = None
    """`moe_dense_tp_size`: None cuts dense MLPs over `tp`, 1 replicates them (in the families that heed it)."""
    dp_lm_head: bool = False
    """`enable_dp_lm_head`: the head is cut over the attention ranks instead of over all of `tp`."""
    whole_shared_experts: bool = False
    """Shared experts are whole on every rank, as under the all-to-all backends (DeepEP and others)."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Every reason why these sizes make no engine, each naming its numbers."""
        sizes = {k: getattr(self, k) for k in ("world", "tp", "dp", "ep", "moe_dp")}
        small = [f"rollout.{k}={v} must be at least 1" for k, v in sizes.items() if v < 1]
        if small:
            return small
        found = []
        if self.world % self.tp:
            found.append(f"world={self.world} is no multiple of rollout.tp={self.tp}: replicas have tp ranks each")
        if self.tp % self.dp:
            found.append(f"rollout.tp={self.tp} is no multiple of rollout.dp={self.dp}: attention is cut over tp/dp")
        if self.tp % (self.ep * self.moe_dp):
            found.append(
                f"rollout.tp={self.tp} is no multiple of rollout.ep={self.ep} · rollout.moe_dp={self.moe_dp}: "
                "experts are cut over tp/ep/moe_dp"
            )
        if self.moe_dense_tp not in (None, 1, self.tp):
            found.append(f"rollout.moe_dense_tp={self.moe_dense_tp}: the engine knows None, 1 and tp={self.tp}")
        return found

    @property
    def attention_tp(self) -> int:
        """Ranks that attention is cut over."""
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        """Ranks that one expert is cut over."""
        return self.tp // self.ep // self.moe_dp

    def moe_ep_rank(self, tp_rank: int) -> int:
        """Which share of the experts a rank of the replica holds."""
        return tp_rank % (self.tp // self.moe_dp) // self.moe_tp


def argued_sizes(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that arguments of SGLang's own decide, as keywords of `RolloutSizes`."""
    names = {"moe_dense_tp_size": "moe_dense_tp", "enable_dp_lm_head": "dp_lm_head"}
    return {names[name]: value for name, value in server_args.items() if name in names}
