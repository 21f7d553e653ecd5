"""The results of `benchmarks/reshard.py` as a table, and what must hold of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
LARGE = 16 * 2**20
"""Bytes received, from which on a rate means something."""


def render(rows: Sequence[Row]) -> str:
    """A line for each case and method."""
    head = f"{'case':32} {'method':8} {'ms':>9} {'copy ms':>8} {'recv MB':>8} {'bound MB':>8}"
    lines = [f"{head} {'GB/s':>6} {'all2all':>7} {'staging MB':>10} {'peak MB':>8}"]
    for row in rows:
        if row["seconds_median"] is None:
            continue
        cells = [
            _scaled(row[key], factor, width, digits)
            for key, factor, width, digits in (
                ("seconds_median", 1e3, 9, 1),
                ("copy_seconds", 1e3, 8, 1),
                ("bytes_received_max", 1e-6, 8, 1),
                ("lower_bound_max", 1e-6, 8, 1),
                ("gb_per_s", 1, 6, 2),
                ("alltoall_gb_per_s", 1, 7, 2),
                ("staging_peak_bytes", 1e-6, 10, 1),
                ("peak_bytes", 1e-6, 8, 1),
            )
        ]
        lines.append(" ".join([f"{row['case']:32} {row['method']:8}", *cells]))
    absent = {row["absent"] for row in rows if row["seconds_median"] is None}
    return "\n".join([*lines, *(f"megatron: absent: {text}" for text in absent)])


def judge(rows: Sequence[Row]) -> str:
    """Each requirement of each case, and whether it holds."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["method"]] = row
    lines = ["", "must hold:"]
    for case, methods in by_case.items():
        for holds, text in _requirements(case, methods["plan"], methods["gather"]):
            lines.append(f"  {'holds' if holds else 'FAILS'}  {case}: {text}")
    return "\n".join(lines)


def _requirements(case: str, plan: Row, gather: Row) -> Iterator[tuple[bool, str]]:
    received, bound = plan["bytes_received_max"], plan["lower_bound_max"]
    yield received == bound, f"{received} bytes received at most, the lower bound is {bound}"
    limit = 2 * plan["bucket_bytes"]
    yield plan["staging_peak_bytes"] <= limit, f"{plan['staging_peak_bytes']} bytes staged, at most {limit}"
    ratio = gather["seconds_median"] / plan["seconds_median"]
    least = 5.0 if case == "headline" or not received else min(5.0, 0.7 * gather["bytes_received_max"] / received)
    yield ratio >= least, f"{ratio:.1f} times as fast as gathering, at least {least:.1f}"
    if received >= LARGE:
        share = plan["gb_per_s"] / plan["alltoall_gb_per_s"]
        yield share >= 0.7, f"{share:.2f} of a plain all-to-all's rate, at least 0.70"


def _scaled(value: float | None, factor: float, width: int, digits: int) -> str:
    return f"{'-' if value is None else f'{value * factor:.{digits}f}':>{width}}"
