"""Cycles of optimizer state off one device and back, with checksums: exact, flat, and at one address.

    python benchmarks/gpu/offload_one_gpu.py --json FILE      # also on a CPU, with less

On a GPU it also shows that the allocator gives the same memory out again each time (`reserved` does not grow, without
any `empty_cache`) and that the arena's pages are locked. `benchmarks/offload.py` measures how fast it is.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload import MIB, ArenaMethod, State
from hybridrl.memory.ledger import used_bytes
from hybridrl.memory.parcel import checksum

SETTLED = 3
"""Cycles after which nothing grows."""


@torch.no_grad()
def cycle(nbytes: int, cycles: int, device: torch.device) -> dict[str, Any]:
    """Runs the cycles; raises AssertionError where a bit changed, or memory grew on a GPU."""
    state = State(nbytes, device)
    method = ArenaMethod(state)
    cuda = device.type == "cuda"
    address, used, reserved = method.parcel.section.data_ptr(), [], []
    started = time.perf_counter()
    for turn in range(cycles):
        before = [checksum(t.view(-1).view(torch.uint8)) for group in state.groups() for t in group]
        method.out()
        left = sum(t.untyped_storage().nbytes() for group in state.groups() for t in group)
        assert left == 0, f"{left} bytes are on the device, in cycle {turn}"
        used.append(used_bytes(device))
        method.back()
        after = [checksum(t.view(-1).view(torch.uint8)) for group in state.groups() for t in group]
        assert all(a.equal(b) for a, b in zip(before, after, strict=True)), f"bits changed in cycle {turn}"
        reserved.append(torch.cuda.memory_reserved(device) if cuda else 0)
        state.optimizer.state[state.optimizer.param_groups[0]["params"][0]]["exp_avg"] += 1
    assert method.parcel.section.data_ptr() == address
    if cuda:
        assert method.parcel.section.is_pinned(), "the arena's pages are not locked"
        assert max(used[SETTLED:]) == min(used[SETTLED:]), f"allocated bytes grow: {used}"
        assert max(reserved[SETTLED:]) == min(reserved[SETTLED:]), f"reserved bytes grow: {reserved}"
    return {
        "device": device.type,
        "bytes": state.nbytes,
        "cycles": cycles,
        "seconds": time.perf_counter() - started,
        "used_while_away": used,
        "reserved": reserved,
    }


def main() -> None:
    """Runs and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", type=int, help="MiB of state (64, on a GPU 16,384)")
    parser.add_argument("--cycles", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = cycle((options.mib or (16384 if device.type == "cuda" else 64)) * MIB, options.cycles, device)
    print(f"{result['cycles']} cycles of {result['bytes'] / MIB:.0f} MiB on {device}: exact, {result['seconds']:.2f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
