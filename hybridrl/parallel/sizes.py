"""Who holds what: the arithmetic between a world rank and its coordinates in Megatron's parallel groups. Pure.

Megatron orders the dense world as `tp-cp-dp-pp` and the expert world as `etp-ep-edp-pp`, the fastest axis first. Both
worlds have the same pipeline stages.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Coordinates(NamedTuple):
    """A rank's place: dense axes `tp, cp, dp, pp` and expert axes `etp, ep, edp` (`pp` is shared)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of the training world.

    Raises ValueError where `world` is not a multiple of `tp*cp*pp` or of `etp*ep*pp`; the message gives each factor.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Every reason why these sizes make no world, each naming its numbers."""
        small = [f"parallel.{k}={v} must be at least 1" for k, v in self._sizes().items() if v < 1]
        if small:
            return small
        found = []
        if self.world % (self.tp * self.cp * self.pp):
            found.append(
                f"world={self.world} is not TP·CP·PP·DP: tp={self.tp} · cp={self.cp} · pp={self.pp} = "
                f"{self.tp * self.cp * self.pp} does not divide it"
            )
        if self.world % (self.etp * self.ep * self.pp):
            found.append(
                f"world={self.world} is not ETP·EP·PP·EDP: etp={self.etp} · ep={self.ep} · pp={self.pp} = "
                f"{self.etp * self.ep * self.pp} does not divide it"
            )
        return found

    def _sizes(self) -> dict[str, int]:
        return {k: getattr(self, k) for k in ("world", "tp", "cp", "pp", "ep", "etp")}

    @property
    def dp(self) -> int:
        """Replicas of the dense weights."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of the expert weights."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a world rank; IndexError outside the world."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is not in a world of {self.world}")
        pp, within = divmod(rank, self.stage)
        dp, rest = divmod(within, self.tp * self.cp)
        cp, tp = divmod(rest, self.tp)
        edp, rest = divmod(within, self.etp * self.ep)
        ep, etp = divmod(rest, self.etp)
        return Coordinates(tp, cp, dp, pp, etp, ep, edp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The world rank at dense coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_rank(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """The world rank at expert coordinates."""
        return etp + self.etp * (ep + self.ep * (edp + self.edp * pp))
