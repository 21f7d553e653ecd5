"""What a recipe is to run on: the figures of a file in `conf/hardware`."""

from dataclasses import dataclass, fields

from hybridrl.reshard.cost import Interconnect
from hybridrl.reshard.explain import find_interconnect, read_conf

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, its share of a node, and the efficiencies that the estimates assume."""

    name: str
    link: Interconnect
    memory_gib: float
    """Of a device."""
    host_memory_gib: float
    """Of a node."""
    host_gb_per_s: float
    """Between a device and its host, each way, from pinned memory."""
    bf16_tflops: float
    training_efficiency: float
    prefill_efficiency: float
    decode_efficiency: float
    decode_layer_us: float
    overhead_gib: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device that the run may use."""
        return int((self.memory_gib - self.overhead_gib) * GIB)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one rank may use."""
        return int(self.host_memory_gib * GIB / self.link.ranks_per_node)


def find_hardware(name: str) -> Hardware:
    """The figures of `conf/hardware/NAME.yaml`. Raises ValueError for a file that lacks any."""
    found = dict(read_conf("hardware", name, "hardware"))
    expected = {f.name for f in fields(Hardware)} - {"name", "link"} | {"interconnect"}
    if set(found) != expected:
        raise ValueError(f"conf/hardware/{name}.yaml has {sorted(found)}; expected {sorted(expected)}")
    return Hardware(name=name, link=find_interconnect(found.pop("interconnect")), **found)
