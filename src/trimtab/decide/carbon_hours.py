"""The hours that a job may have, in whole microseconds from now on: sums of them are exact, and so is what is equal."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.carbon import Intensity

MICRO = 1_000_000
# A search over more moments, or over more sums of their distances, takes seconds.
MOST_MOMENTS = 300
MOST_LABELS = 200_000


def microseconds(seconds: float) -> int:
    """Return whole microseconds, the nearest."""
    return round(seconds * MICRO)


@dataclass(frozen=True)
class Hours:
    """What is known between two moments.

    Args:
        end_s: the later one. points: microseconds from the earlier one on: 0, where the intensity steps, and the end.
        moments: the same in seconds since 1970. levels: grams per kWh from each point on. totals: their integral up to
            each point, in g s / kWh.
    """

    end_s: float
    points: tuple[int, ...]
    moments: tuple[float, ...]
    levels: tuple[float, ...]
    totals: tuple[float, ...]

    def total(self, point: int) -> float:
        """Return the integral of the intensity from the first moment to another one, in g s / kWh."""
        index = min(max(bisect.bisect_right(self.points, point) - 1, 0), len(self.points) - 1)
        return self.totals[index] + self.levels[index] * (point - self.points[index]) / MICRO

    def moment(self, point: int) -> float:
        """Return seconds since 1970: of a step as it was given, and never after the end."""
        index = bisect.bisect_right(self.points, point) - 1
        return min(self.moments[index] + (point - self.points[index]) / MICRO, self.end_s)


def hours_of(forecast: Intensity, begin_s: float, end_s: float) -> Hours:
    """Return the hours between two moments, over all of which the forecast is known."""
    times = [begin_s, *(time_s for time_s, _ in forecast.steps if begin_s < time_s < end_s), end_s]
    of_point = {microseconds(time_s - begin_s): time_s for time_s in reversed(times)}  # of two in one, the earlier
    points = sorted(of_point)
    starts = [time_s for time_s, _ in forecast.steps]
    moments = [of_point[point] for point in points]
    levels = [forecast.steps[bisect.bisect_right(starts, moment) - 1][1] for moment in moments]
    parts = [
        level * (after - point) / MICRO
        for level, (point, after) in zip(levels, itertools.pairwise(points), strict=False)
    ]
    totals = itertools.accumulate(parts, initial=0.0)
    return Hours(end_s, tuple(points), tuple(moments), tuple(levels), tuple(totals))


def moments_to_pause(points: Sequence[int]) -> tuple[int, ...]:
    """Return the points at which a pause may begin or end: those given, which are steps, where they are few.

    Where they are too many, or so uneven that hardly two sums of their distances are alike: about `MOST_MOMENTS`,
    spread evenly over the same time, on steps as far as these are even.
    """
    inner, end = points[1:-1], points[-1]
    if len(inner) < 2:
        return tuple(points)
    unit = math.gcd(*(after - before for before, after in itertools.pairwise(inner)))
    labels = min(2 ** min(len(points), 60), 2 * (end // unit + 1))
    if len(points) * labels <= MOST_LABELS:
        return tuple(points)
    unit *= -(-end // (MOST_MOMENTS * unit))
    return (0, *range(inner[0] % unit or unit, end, unit), end)
