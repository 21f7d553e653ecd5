"""What a layout is: for every rank, which boxes of which tensors lie where in a framework's own parameters.

A layout is built from a model's weight map and parallel sizes alone, so any rank of any world can be asked about.
Ranks are those of the one `torch.distributed` world. The two views agree: `pieces(rank)` lists a rank's pieces, and
`holders(tensor)` lists, for one tensor, each distinct piece with all the ranks that hold it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridrl.models.weights import Param, Piece, Tensor, WeightMap


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


@runtime_checkable
class PaddedLayout(Layout, Protocol):
    """A layout whose parameters are zero wherever no piece is, at all times (`zero_padding`).

    So a destination's parameter with the same pieces, of which a reshard sets the padding to zero, may share storage.
    """

    @property
    def zero_padding(self) -> bool:
        """Whether that holds."""


@runtime_checkable
class ClassedLayout(Layout, Protocol):
    """A layout that says which of its tensors lie alike, so that a planner need look at one of each kind only."""

    def alike(self, tensor: Tensor) -> Hashable:
        """Tensors of equal shape with equal keys have holders that differ in nothing but names and expert offsets.

        In the same order, they have the same boxes, ranks and numbers of dimensions. All parameters that hold tensors
        of one role have one dtype.
        """
