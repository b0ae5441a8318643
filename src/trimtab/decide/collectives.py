"""Seconds of collectives on a ring of ranks, and the link that timed ones tell.

A hop takes the link's latency and its bytes over the bandwidth (the alpha-beta model: Hockney 1994). Of R ranks each
passes pieces of 1/R of the bytes to the next one: R - 1 hops reduce and scatter them or gather them, and an all-reduce
is one and then the other (Patarasuk and Yuan 2009). NCCL's bus bandwidth divides by the same hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.link import Link

# Of a published bandwidth, the share that a ring reaches. NCCL reckons with 20 of an NVLink's 25 GB/s on an A100, with
# 20.6 of 25 on an H100 and with 40.1 of 50 on a B200 (2.30, src/graph/topo.h); of networks it is assumed.
REACHED = 0.8
# Sizes that tell a link: two give a line, and one more says how straight it is.
MIN_SIZES = 3


def all_reduce_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return seconds in which every rank gets the sum of all ranks' bytes; no rank but one: none."""
    return 2 * _around_s(link, ranks, num_bytes)


def reduce_scatter_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return seconds in which every rank gets its 1/R of the sum.

    Args:
        num_bytes: of the whole, which each rank has before.
    """
    return _around_s(link, ranks, num_bytes) if link.scatters else all_reduce_s(link, ranks, num_bytes)


def all_gather_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return seconds in which every rank gets the others' shards.

    Args:
        num_bytes: of the whole, which each rank has afterwards.
    """
    return _around_s(link, ranks, num_bytes)


def broadcast_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return seconds in which one rank's bytes pass along the ring, each rank sending on what it has received."""
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * link.latency_s + num_bytes / _bandwidth(link)


def _around_s(link: Link, ranks: int, num_bytes: float) -> float:
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * (link.latency_s + num_bytes / ranks / _bandwidth(link))


def _bandwidth(link: Link) -> float:
    return link.bytes_per_s if link.calibrated else REACHED * link.bytes_per_s


class Fit(NamedTuple):
    """A link from timed all-reduces, and by how much the worst of them is missed, as a share of its seconds."""

    link: Link
    miss: float


def fit(points: Sequence[tuple[float, float]], ranks: int, name: str = "measured", *, scatters: bool = True) -> Fit:
    """Return the link by which all-reduces of a process group take what they were timed to take.

    The least squares of relative errors, so that small ones, which tell the latency, and large ones, which tell the
    bandwidth, count alike; neither is below zero.

    Args:
        points: (bytes, seconds) of each.
        scatters: of the link.

    Raises:
        ValueGivenError: one rank; fewer than three sizes, or no two of which one is twice the other; seconds that do
            not grow with bytes.
    """
    checks.integer("link.ranks", ranks, low=2)
    _check(points)
    base_s, byte_s = _line(points)
    if byte_s <= 0:
        given = "all-reduces that take no longer the larger they are"
        raise ValueGivenError("link.points", given=given, expected="larger ones, or more of each")
    hops = 2 * (ranks - 1)
    said = f"all-reduces of {ranks} ranks, timed"
    link = Link(name, base_s / hops, hops / ranks / byte_s, said, calibrated=True, scatters=scatters)
    return Fit(link, max(abs(all_reduce_s(link, ranks, size) / seconds - 1) for size, seconds in points))


def _check(points: Sequence[tuple[float, float]]) -> None:
    sizes = {checks.number("link.points.bytes", size, low=1) for size, _ in points}
    for _, seconds in points:
        checks.number("link.points.seconds", seconds, low=1e-9)
    if len(sizes) < MIN_SIZES or max(sizes) < 2 * min(sizes):
        expected = f"{MIN_SIZES} sizes at least, the largest twice the smallest or more"
        raise ValueGivenError("link.points", given=f"sizes {sorted(sizes)}", expected=expected)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (seconds at no bytes, seconds a byte), neither below zero."""
    weighed = [(1 / seconds**2, size, seconds) for size, seconds in points]
    total = math.fsum(weight for weight, _, _ in weighed)
    size_mean = math.fsum(weight * size for weight, size, _ in weighed) / total
    seconds_mean = math.fsum(weight * seconds for weight, _, seconds in weighed) / total
    spread = math.fsum(weight * (size - size_mean) ** 2 for weight, size, _ in weighed)
    slope = math.fsum(weight * (size - size_mean) * (seconds - seconds_mean) for weight, size, seconds in weighed)
    slope /= spread
    base = seconds_mean - slope * size_mean
    if base >= 0:
        return base, slope
    squares = math.fsum(weight * size**2 for weight, size, _ in weighed)
    return 0.0, math.fsum(weight * size * seconds for weight, size, seconds in weighed) / squares
