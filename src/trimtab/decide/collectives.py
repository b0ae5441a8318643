"""Time of ring collectives, and a fit of the link from timed all-reduces.

A hop takes the link's latency plus bytes over bandwidth (the alpha-beta model: Hockney 1994). In a ring of R ranks,
every rank passes pieces of 1/R of the bytes to its neighbour: a reduce-scatter or all-gather takes R - 1 hops, and an
all-reduce is a reduce-scatter followed by an all-gather (Patarasuk and Yuan 2009). NCCL's bus bandwidth divides by the
same number of hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.interconnect import Link

# Fraction of a published bandwidth that a ring reaches. NCCL assumes 20 of an NVLink's 25 GB/s on an A100, 20.6 of 25
# on an H100 and 40.1 of 50 on a B200 (2.30, src/graph/topo.h); for networks the value is an assumption.
REACHED = 0.8
# Least number of sizes for a fit: two determine a line, and a third shows its error.
MIN_SIZES = 3


def all_reduce_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of an all-reduce; 0 for a single rank."""
    return 2 * _around_s(link, ranks, num_bytes)


def reduce_scatter_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of a reduce-scatter.

    Args:
        link: latency and bandwidth.
        ranks: world size.
        num_bytes: bytes of the whole tensor, which every rank holds before.
    """
    return _around_s(link, ranks, num_bytes) if link.scatters else all_reduce_s(link, ranks, num_bytes)


def all_gather_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of an all-gather.

    Args:
        link: latency and bandwidth.
        ranks: world size.
        num_bytes: bytes of the whole tensor, which every rank holds afterwards.
    """
    return _around_s(link, ranks, num_bytes)


def broadcast_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of a pipelined broadcast along the ring."""
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * link.latency_s + num_bytes / _bandwidth(link)


def _around_s(link: Link, ranks: int, num_bytes: float) -> float:
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * (link.latency_s + num_bytes / ranks / _bandwidth(link))


def _bandwidth(link: Link) -> float:
    return link.bytes_per_s if link.calibrated else REACHED * link.bytes_per_s


class LinkFit(NamedTuple):
    """Fitted link, and the largest relative error of a timed all-reduce."""

    link: Link
    miss: float


def fit(points: Sequence[tuple[float, float]], ranks: int, name: str = "measured", *, scatters: bool = True) -> LinkFit:
    """Return the link that best explains timed all-reduces of a process group.

    Least squares of relative errors, so that small sizes (latency) and large sizes (bandwidth) count equally. Latency
    and bandwidth are not negative.

    Args:
        points: (bytes, seconds) of the timed all-reduces.
        ranks: world size.
        name: name of the link.
        scatters: the backend has a reduce-scatter, see `Link`.

    Raises:
        ValueGivenError: a single rank; fewer than three sizes, or a largest size below twice the smallest; times that
            do not grow with size.
    """
    validation.integer("link.ranks", ranks, low=2)
    _check(points)
    base_s, byte_s = _line(points)
    if byte_s <= 0:
        raise ValueGivenError(
            "link.points",
            got=f"{len(points)} timings",
            problem="The timed all-reduces do not take longer with more bytes, so no bandwidth can be fitted.",
            hint="Time larger all-reduces, or repeat each size more often.",
            code="link.no_bandwidth",
        )
    hops = 2 * (ranks - 1)
    source = f"timed all-reduces of {ranks} ranks"
    link = Link(name, base_s / hops, hops / ranks / byte_s, source, calibrated=True, scatters=scatters)
    return LinkFit(link, max(abs(all_reduce_s(link, ranks, size) / seconds - 1) for size, seconds in points))


def _check(points: Sequence[tuple[float, float]]) -> None:
    sizes = {validation.number("link.points.bytes", size, low=1) for size, _ in points}
    for _, seconds in points:
        validation.number("link.points.seconds", seconds, low=1e-9)
    if len(sizes) < MIN_SIZES or max(sizes) < 2 * min(sizes):
        expected = f"at least {MIN_SIZES} sizes, the largest at least twice the smallest"
        raise ValueGivenError("link.points", got=f"sizes {sorted(sizes)}", expected=expected)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (seconds at 0 bytes, seconds per byte), both not negative."""
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
