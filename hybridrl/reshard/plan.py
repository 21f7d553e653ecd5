"""What a rank does in a reshard, as data: aliases, copies, fills, and rounds of messages. Nothing here runs anything.

A rank carries out its plan in this order: `copies` and `fills` (local), `rounds` one after another, `echoes`, and then
the engine's rebuilding of `derived` state. Every element of every destination parameter of the rank is written
exactly once by these, or is an alias's.

All positions are in parameters' own coordinates. A parameter is read as row-major elements of a `View`; source and
destination views of one movement have equal numbers of elements, in the same order, though a stack of experts has a
leading dimension more than a single expert.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hybridrl.models.weights import ITEM_BYTES

if TYPE_CHECKING:
    from hybridrl.reshard.planner import Planner


@dataclass(frozen=True, slots=True)
class View:
    """The elements `param[offset[d] : offset[d] + extent[d], ...]` of a parameter of this dtype."""

    param: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indexes the parameter to the view."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.extent:
            size *= extent
        return size

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Alias:
    """The destination parameter is, byte for byte, this source parameter of the same rank: it may be its storage."""

    source: str
    destination: str
    nbytes: int
    padding_bytes: int = 0
    """Of them, padding, which is zero on both sides."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A movement within the rank. Where the two dtypes differ, each element is converted (rounded to nearest even)."""

    source: View
    destination: View


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a message: the elements of `view` in row-major order, as `wire_dtype`, `offset` bytes into staging.

    The sender converts the view's dtype to the wire's, the receiver the wire's to the view's; at most one of the two
    is a change, so that the values are those of one direct conversion.
    """

    view: View
    wire_dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.view.size * ITEM_BYTES[self.wire_dtype]


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to, or comes from, one peer in one round: `nbytes` of the staging buffer, from `offset` on.

    The segments lie end to end. The peer's matching message has the same segments in the same order.
    """

    peer: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that are in flight together, in ascending order of peers.

    Offsets count from the start of the rank's send buffer or its receive buffer; each of the two has `bucket_bytes` at
    most. All ranks have the same number of rounds, and a message is in the same round on both of its ends.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    relay: bool = False
    """Sends read this rank's *destination* parameters, which earlier rounds have written, instead of source ones."""

    @property
    def send_bytes(self) -> int:
        """Bytes of the send buffer in use."""
        return max((m.offset + m.nbytes for m in self.sends), default=0)

    @property
    def receive_bytes(self) -> int:
        """Bytes of the receive buffer in use."""
        return max((m.offset + m.nbytes for m in self.receives), default=0)


@dataclass(frozen=True, slots=True)
class Derived:
    """State of the engine that is computed from parameters, and must be rebuilt in place after each sync."""

    name: str
    sources: tuple[str, ...]
    """Destination parameters that it is computed from; the engine may read them through it alone."""
    hook: str
    """What rebuilds it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that one rank does. See the module's text for the order."""

    rank: int
    bucket_bytes: int
    aliases: tuple[Alias, ...]
    copies: tuple[Copy, ...]
    """From source parameters to destination parameters."""
    fills: tuple[View, ...]
    """Padding of destination parameters, which is set to zero."""
    rounds: tuple[Round, ...]
    echoes: tuple[Copy, ...]
    """From destination parameters to destination parameters: what a rank needs twice is received once."""
    derived: tuple[Derived, ...]
    planner: "Planner" = field(repr=False, compare=False)

    @cached_property
    def aliased_bytes(self) -> int:
        return sum(alias.nbytes for alias in self.aliases)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes written by local copies (echoes among them)."""
        return sum(copy.destination.nbytes for copy in (*self.copies, *self.echoes))

    @cached_property
    def received_bytes(self) -> int:
        """Bytes on the wire to this rank."""
        return sum(m.nbytes for r in self.rounds for m in r.receives)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes on the wire from this rank."""
        return sum(m.nbytes for r in self.rounds for m in r.sends)

    @property
    def send_staging_bytes(self) -> int:
        """Size that the send buffer must have."""
        return max((r.send_bytes for r in self.rounds), default=0)

    @property
    def receive_staging_bytes(self) -> int:
        """Size that the receive buffer must have."""
        return max((r.receive_bytes for r in self.rounds), default=0)

    @property
    def staging_peak_bytes(self) -> int:
        """Most bytes staged at once, both buffers together; at most twice `bucket_bytes`."""
        return max((r.send_bytes + r.receive_bytes for r in self.rounds), default=0)
