"""Time axis of a carbon schedule, in whole microseconds from now: sums and comparisons are exact."""

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
    """Return the nearest whole number of microseconds."""
    return round(seconds * MICRO)


@dataclass(frozen=True)
class IntensitySteps:
    """Carbon intensity between two moments, as a step function.

    Args:
        end_s: end, in seconds since 1970.
        points: microseconds since the begin: 0, the steps of the intensity, and the end.
        moments: the points in seconds since 1970.
        levels: grams per kWh from a point to the next.
        totals: integral of the intensity from the begin to a point, in g s / kWh.
    """

    end_s: float
    points: tuple[int, ...]
    moments: tuple[float, ...]
    levels: tuple[float, ...]
    totals: tuple[float, ...]

    def total(self, point: int) -> float:
        """Return the integral of the intensity from the begin to a point, in g s / kWh."""
        index = min(max(bisect.bisect_right(self.points, point) - 1, 0), len(self.points) - 1)
        return self.totals[index] + self.levels[index] * (point - self.points[index]) / MICRO

    def moment(self, point: int) -> float:
        """Return a point in seconds since 1970: exact at a step of the forecast, never after the end."""
        index = bisect.bisect_right(self.points, point) - 1
        return min(self.moments[index] + (point - self.points[index]) / MICRO, self.end_s)


def hours_of(forecast: Intensity, begin_s: float, end_s: float) -> IntensitySteps:
    """Return the intensity between two moments; the forecast must cover them."""
    times = [begin_s, *(time_s for time_s, _ in forecast.steps if begin_s < time_s < end_s), end_s]
    # if two fall into one microsecond, the earlier
    of_point = {microseconds(time_s - begin_s): time_s for time_s in reversed(times)}
    points = sorted(of_point)
    starts = [time_s for time_s, _ in forecast.steps]
    moments = [of_point[point] for point in points]
    levels = [forecast.steps[bisect.bisect_right(starts, moment) - 1][1] for moment in moments]
    parts = [
        level * (after - point) / MICRO
        for level, (point, after) in zip(levels, itertools.pairwise(points), strict=False)
    ]
    totals = itertools.accumulate(parts, initial=0.0)
    return IntensitySteps(end_s, tuple(points), tuple(moments), tuple(levels), tuple(totals))


def moments_to_pause(points: Sequence[int]) -> tuple[int, ...]:
    """Return the points at which a pause may begin or end: the given steps, if they are few.

    For too many steps, or steps so uneven that almost all sums of their distances differ: about `MOST_MOMENTS` points
    spread evenly over the same time, placed on steps if the steps are even.
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
