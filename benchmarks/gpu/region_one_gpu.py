"""Address-stable regions on one device: that they do what they promise, and what a cycle costs.

    python benchmarks/gpu/region_one_gpu.py --mib 4096 --json FILE

Checked: reserved address space takes no memory; committed pages are the device's, and all of them come back with a
release, in the middle of a region too; addresses stay; neighbours of what is given back keep their values; a second
release and an unaligned one are refused; on CUDA a captured graph goes on to be right after its pages were given back
and taken again; and there and back of one copy of the weights (every page of one region to another, page by page) is
bit for bit and takes no more memory than one side and a few pages.

Timed: a release and a commit of the whole region, with pages from the driver and with pages that were kept, and the
cycle there and back without its copies.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybridrl.memory.region import Region, RegionError

STEP = 64
"""Pages that go from one region to the other at a time."""


def main() -> None:
    """Checks, measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024, help="size of a region")
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    nbytes = options.mib * 2**20
    check_addresses(2**20, device)  # what libraries take at their first use is no region's
    checks = {name: check(nbytes, device) for name, check in CHECKS.items()}
    seconds = measure(nbytes, device, options.cycles)
    result = {"device": _name(device), "bytes": nbytes, "checks": checks, **seconds}
    times = ", ".join(f"{name.removesuffix('_seconds')} {1e3 * value:.2f} ms" for name, value in seconds.items())
    wrong = [name for name, told in checks.items() if told]
    print(f"{result['device']}, {options.mib} MiB: {len(checks) - len(wrong)} of {len(checks)} checks hold; {times}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit("\n".join(f"{name}: {checks[name]}" for name in wrong))


def check_pages(nbytes: int, device: torch.device) -> str:
    """Pages are taken and given back exactly."""
    free = _free(device)
    region = Region(nbytes, device)
    tensor, page = region.take((region.nbytes,), torch.uint8), region.page_bytes
    noise = 32 * page if device.type == "cuda" else 2 * 2**20
    if free - _free(device) > noise:
        return "reserved address space took memory"
    region.commit()
    tensor.fill_(5)
    if abs(free - _free(device) - region.nbytes) > noise:
        return f"{free - _free(device)} bytes were taken for {region.nbytes}"
    half = region.nbytes // 2 // page * page
    region.release(page, half)
    region.trim()
    if abs(free - _free(device) - (region.nbytes - half + page)) > noise:
        return "a range that was given back is still taken"
    if int(tensor[:page].min()) != 5 or int(tensor[half:].min()) != 5:
        return "neighbours of what was given back lost their values"
    region.close()
    return "" if abs(free - _free(device)) <= noise else f"{free - _free(device)} bytes are taken after close"


def check_refusals(nbytes: int, device: torch.device) -> str:
    """What cannot be is refused."""
    region = Region(nbytes, device)
    region.commit()
    region.release(0, region.page_bytes)
    calls: dict[str, Callable[[], object]] = {
        "a second release": lambda: region.release(0, region.page_bytes),
        "half a page": lambda: region.commit(0, region.page_bytes // 2),
        "a tensor beyond the end": lambda: region.take((region.nbytes + 1,), torch.uint8),
        "a read of nothing": lambda: region.check(region.take((8,), torch.float32), "a read of nothing"),
    }
    for name, call in calls.items():
        try:
            call()
        except RegionError:
            continue
        return f"{name} was not refused"
    region.close()
    return ""


def check_addresses(nbytes: int, device: torch.device) -> str:
    """Views, matrix products and, on CUDA, captured graphs go on to be right."""
    region = Region(nbytes, device)
    region.commit()
    weight, given, result = (region.take((256, 256), torch.float32) for _ in range(3))
    place, graph = weight.data_ptr(), None
    given.copy_(torch.eye(256))
    if device.type == "cuda":
        torch.mm(weight, given, out=result)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(weight, given, out=result)
    for value in (1.0, 2.0, 3.0):
        region.release()
        region.commit()
        if weight.data_ptr() != place:
            return "an address changed"
        weight.fill_(value)
        given.copy_(torch.eye(256))
        if graph is None:
            torch.mm(weight, given, out=result)
        else:
            graph.replay()
        if not bool((result == value).all()):
            return f"after pages were given back and taken again, a product of {value} is {float(result.max())}"
    region.close()
    return ""


def check_one_copy(nbytes: int, device: torch.device) -> str:
    """All bytes go from one region to another and back, and are never there twice."""
    there, back = Region(nbytes, device), Region(nbytes, device)
    ours, theirs = (region.take((region.nbytes,), torch.uint8) for region in (there, back))
    there.commit()
    torch.manual_seed(0)
    ours.view(torch.int32).random_()
    total = ours.view(torch.int32).sum(dtype=torch.int64)
    free, least = _free(device), _free(device)
    step = STEP * there.page_bytes
    for source, destination, reads, writes in ((there, back, ours, theirs), (back, there, theirs, ours)):
        for start in range(0, there.nbytes, step):
            stop = min(start + step, there.nbytes)
            destination.commit(start, stop)
            writes[start:stop].copy_(reads[start:stop])
            least = min(least, _free(device))
            source.release(start, stop)
    slack = 2 * step + (2**20 if device.type == "cpu" else 0)
    if free - least > slack:
        return f"{free - least} bytes more than one side were taken, {slack} expected at most"
    if ours.view(torch.int32).sum(dtype=torch.int64) != total:
        return "other bytes came back"
    there.close()
    back.close()
    return ""


CHECKS: dict[str, Callable[[int, torch.device], str]] = {
    "pages": check_pages,
    "refusals": check_refusals,
    "addresses": check_addresses,
    "one copy": check_one_copy,
}


def measure(nbytes: int, device: torch.device, cycles: int) -> dict[str, float]:
    """Medians in seconds."""
    region, other = Region(nbytes, device), Region(nbytes, device)
    tensor = region.take((region.nbytes,), torch.uint8)
    region.commit()
    taken: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        _settle(device)
        start = time.perf_counter()
        call()
        _settle(device)
        taken.setdefault(name, []).append(time.perf_counter() - start)

    def switch(source: Region, destination: Region) -> None:
        step = STEP * source.page_bytes
        for start in range(0, source.nbytes, step):
            stop = min(start + step, source.nbytes)
            destination.commit(start, stop)
            source.release(start, stop)

    for _ in range(cycles):
        tensor.fill_(1)
        timed("release_seconds", region.release)
        timed("commit_kept_seconds", region.commit)
        region.release()
        timed("trim_seconds", region.trim)
        timed("commit_seconds", region.commit)
        timed("fill_seconds", lambda: tensor.fill_(1))
        timed("there_seconds", lambda: switch(region, other))
        timed("back_seconds", lambda: switch(other, region))
    region.close()
    other.close()
    return {name: statistics.median(values) for name, values in taken.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> int:
    """Bytes of memory that are free on a GPU; on a CPU, less than nothing: what this process has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()  # counted, where others are estimates
    line = next(line for line in lines if line.startswith("Rss:"))
    return -int(line.split()[1]) * 1024


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
