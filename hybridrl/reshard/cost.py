"""The predicted time of a reshard on a named interconnect: what each rank moves over each link, at its bandwidth.

The model is a bound by the busiest rank, not a simulation: node and network links work at the same time, each rank
sends and receives at once at the full rate, every round adds a latency, and packing, unpacking and local copies read
and write device memory once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Nominal figures of one rank's links, in GB/s (10^9 bytes) for each direction."""

    name: str
    ranks_per_node: int
    node_gb_per_s: float
    network_gb_per_s: float | None
    """None where there is one node only."""
    device_gb_per_s: float
    round_latency_us: float

    def seconds(self, *, node: float, network: float, device: float, rounds: int) -> float:
        """Time of the busiest rank that moves so many bytes over each of its links.

        Raises ValueError where bytes cross the network of an interconnect that has none.
        """
        if network and self.network_gb_per_s is None:
            raise ValueError(
                f"interconnect {self.name} is one node of {self.ranks_per_node} ranks: name one of several"
            )
        over_network = network / self.network_gb_per_s if self.network_gb_per_s is not None else 0.0
        links = max(node / self.node_gb_per_s, over_network)
        return (links + device / self.device_gb_per_s) / 1e9 + rounds * self.round_latency_us / 1e6


def plan_seconds(link: Interconnect, direct: Bytes, relayed: Bytes, copied: Bytes, rounds: int) -> float:
    """Time of a plan.

    Args:
        direct, relayed: bytes from row to column, shape (world, world); relays come after all direct messages.
        copied: bytes that each rank copies locally, shape (world,).
    """
    nodes = np.arange(len(copied)) // link.ranks_per_node
    near = nodes[:, None] == nodes
    total = 0.0
    for traffic in (direct, relayed):
        node, network = (np.where(mask, traffic, 0) for mask in (near, ~near))
        busiest = [int(max(part.sum(0).max(), part.sum(1).max())) for part in (node, network)]
        total += link.seconds(node=busiest[0], network=busiest[1], device=0, rounds=0)
    moved = direct + relayed
    device = 2 * (moved.sum(0) + moved.sum(1) + copied)
    return total + link.seconds(node=0, network=0, device=int(device.max()), rounds=rounds)


def gather_seconds(link: Interconnect, received: Bytes, model_bytes: int, bucket_bytes: int) -> float:
    """Time of the gather baseline: every rank receives the model, each node fetches it over the network once.

    Args:
        received: bytes that each rank receives, shape (world,).
    """
    world, most = len(received), int(received.max())
    several = world > link.ranks_per_node
    network = most / link.ranks_per_node if several else 0.0
    rounds = -(-model_bytes // bucket_bytes)
    return link.seconds(node=most, network=network, device=2 * (most + model_bytes), rounds=rounds)
