"""How staged bytes get to the other ranks: one small file a backend, three methods each."""

import torch
import torch.distributed as dist

from hybridrl.reshard.transports.base import Exchange, Transport, TransportError
from hybridrl.reshard.transports.gloo import GlooTransport
from hybridrl.reshard.transports.nccl import NcclTransport
from hybridrl.reshard.transports.none import NoTransport
from hybridrl.reshard.transports.shared import SharedTransport

__all__ = [
    "Exchange",
    "GlooTransport",
    "NcclTransport",
    "NoTransport",
    "SharedTransport",
    "Transport",
    "TransportError",
    "make_transport",
]


def make_transport(device: torch.device, group: dist.ProcessGroup | None = None) -> Transport:
    """The transport for tensors of a device over a group (None: the world, or no one where there is none). Collective.

    On a CPU it is shared memory where all ranks can open each other's, as on one machine, and gloo where not.

    Raises ValueError for a device that no transport serves.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return NoTransport()
    if device.type == "cpu":
        return SharedTransport.connect(group) or GlooTransport(group)
    if device.type == "cuda":
        return NcclTransport(group)
    raise ValueError(f"no transport moves tensors of {device}: expected cpu or cuda")
