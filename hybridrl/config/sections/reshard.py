"""How trained weights get into the engine."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ReshardConfig:
    """How trained weights get into the engine."""

    bucket_bytes: int = 256 * 2**20
    """At most twice this many bytes are staged on a rank while weights are exchanged."""
    placement: str = "identity"
    """Which ranks the engine's replicas are made of: `identity` (0, 1, 2, …), or `auto`, those that leave most bytes in
    place."""
    verify: bool = False
    """Compare checksums of sent and received weights after each sync."""
