"""What a layout is: for every rank, which boxes of which tensors lie where in a framework's own parameters.

A layout is built from a model's weight map and parallel sizes alone, so any rank of any world can be asked about.
Ranks are those of the one `torch.distributed` world. The two views agree: `pieces(rank)` lists a rank's pieces, and
`holders(tensor)` lists, for one tensor, each distinct piece with all the ranks that hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrl.models.weights import Param, Piece, WeightMap


@dataclass(frozen=True, slots=True)
class Holder:
    """One piece and, in ascending order, the ranks that hold it at that same place."""

    piece: Piece
    ranks: tuple[int, ...]


class Layout(Protocol):
    """A pure function from ranks to pieces."""

    @property
    def weights(self) -> WeightMap:
        """The tensors that the layout stores."""

    @property
    def ranks(self) -> Sequence[int]:
        """World ranks that take part."""

    def params(self, rank: int) -> Mapping[str, Param]:
        """The rank's own parameters in the framework's order: name, shape and dtype. Raises KeyError off the ranks."""

    def pieces(self, rank: int) -> Sequence[Piece]:
        """The rank's pieces, in tensor order. Elements of a parameter that no piece covers are padding."""

    def holders(self, tensor: str) -> Sequence[Holder]:
        """All distinct pieces of a tensor and who holds them. Empty if no rank stores it. KeyError if unknown."""
