"""Carbon-aware training schedule: start now, later, or train in several periods.

Starting now is the baseline, and the result if the forecast is insufficient.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.carbon.intensity import Intensity
from trimtab.carbon.job import PauseCost, PowerDraw, TrainingJob, TrainingPeriod, grams_of, power_draws
from trimtab.core.units import format_grams, format_moment, format_seconds
from trimtab.core.validation import number

# Times are whole microseconds from now, so that sums and comparisons are exact.
MICRO = 1_000_000
# A search over more moments, or over more sums of their distances, takes seconds.
MOST_MOMENTS = 300
MOST_LABELS = 200_000
# Minimum relative cost of a pause: among schedules of equal cost, the one with fewer pauses wins.
TIE = 1e-9
# Least relative saving that justifies waiting: forecasts have larger errors.
LEAST_SAVING = 0.01
DAY_S = 86400.0


def microseconds(seconds: float) -> int:
    """Return the nearest whole number of microseconds."""
    return round(seconds * MICRO)


class IntensitySteps:
    """A forecast between two moments that it covers, over points in microseconds since the begin.

    Attributes:
        points: 0, the steps of the forecast, and the end.
    """

    def __init__(self, forecast: Intensity, begin_s: float, end_s: float) -> None:
        steps = {microseconds(at_s - begin_s): (at_s, grams) for at_s, _, grams in forecast.spans(begin_s, end_s)}
        steps[microseconds(end_s - begin_s)] = end_s, 0.0
        self.points = tuple(steps)
        self._moments = [at_s for at_s, _ in steps.values()]
        self._levels = [grams for _, grams in steps.values()]
        lengths = (after - before for before, after in itertools.pairwise(steps))
        parts = (level * length / MICRO for level, length in zip(self._levels, lengths, strict=False))
        self._totals = list(itertools.accumulate(parts, initial=0.0))

    def total(self, point: int) -> float:
        """Return the integral of the intensity from the begin to a point, in g s / kWh."""
        index = bisect.bisect_right(self.points, point) - 1
        return self._totals[index] + self._levels[index] * (point - self.points[index]) / MICRO

    def moment(self, point: int) -> float:
        """Return a point in seconds since 1970: exact at a step of the forecast, never after the end."""
        index = bisect.bisect_right(self.points, point) - 1
        return min(self._moments[index] + (point - self.points[index]) / MICRO, self._moments[-1])


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


def best_stretches(hours: IntensitySteps, job: TrainingJob) -> tuple[TrainingPeriod, ...] | None:
    """Return the periods of least emissions in `hours`; None if the job does not fit or may not be paused.

    All pauses begin and end at a step. Of the cheapest schedule, the first period begins or the last ends at one too,
    so that two searches find it: one forwards in time, one backwards.
    """
    if job.pause is None:
        return None
    found = [each for direction in (1, -1) if (each := _cheapest(hours, job, job.pause, direction))]
    if not found:
        return None
    _, chain = min(found, key=lambda each: each[0])
    points = []
    while chain is not None:
        point, chain = chain
        points.append(abs(point))
    moments = [hours.moment(point) for point in sorted(points)]
    return tuple(TrainingPeriod(*pair) for pair in zip(moments[::2], moments[1::2], strict=True))


# A cost in W g s / kWh, and begins and ends of periods so far as nested pairs: (last point, the points before).
_Way = tuple[float, tuple[int, Any] | None]


def _cheapest(hours: IntensitySteps, job: TrainingJob, pause: PauseCost, direction: int) -> _Way | None:
    """Return the cheapest schedule whose pauses and first point lie at steps; None if the job does not fit.

    Points are multiplied by `direction`: for -1, they ascend from the end of `hours` to its begin.
    Training ways are stored under work done minus the current point, and paused ways under work done; neither key
    changes with time. Costs are stored minus the cost of training or idling up to the point, so a way is stored once.
    """
    work, lost = microseconds(job.seconds), microseconds(pause.seconds)
    least, gap = max(1, microseconds(pause.least_stretch_s)), max(1, lost)
    tie = TIE * job.watts * hours.total(hours.points[-1])
    points = sorted(direction * point for point in moments_to_pause(hours.points))

    def total(point: int) -> float:
        return direction * hours.total(direction * point)

    def waiting(begin: int, counts: bool) -> float:
        """Return the cost of waiting until the first period, counted at its begin."""
        return job.waiting_watts * hours.total(direction * begin) if counts else 0.0

    def pausing(end: int, counts: bool) -> float:
        """Return the cost of a pause in addition to idling, counted at the end of the pause."""
        lost_g = hours.total(direction * end) - hours.total(max(0, direction * end - lost))
        return tie + (pause.watts - pause.idle_watts) * lost_g if counts else 0.0

    best: _Way | None = None
    training: dict[int, _Way] = {}
    paused: dict[int, _Way] = {}
    begun: deque[tuple[int, int, _Way]] = deque()  # not yet long enough to be paused, in order of time
    stopped: deque[tuple[int, int, _Way]] = deque()  # not yet long enough to be resumed
    for point in points:
        _release(begun, point, training)
        _release(stopped, point, paused)
        trained, idled = job.watts * total(point), pause.idle_watts * total(point)
        back = idled + pausing(point, direction > 0)
        resumed = [(done, cost + back, past) for done, (cost, past) in paused.items()]
        for done, cost, past in [(0, waiting(point, direction > 0), None), *resumed]:
            end = point + work - done
            if end > points[-1]:
                continue
            cost -= trained
            whole = cost + job.watts * total(end) + waiting(end, direction < 0)
            if best is None or whole < best[0]:
                best = whole, (end, (point, past))
            begun.append((point + least, done - point, (cost, (point, past))))
        stop = trained - idled + pausing(point, direction < 0)
        for key, (cost, past) in training.items():
            if work - key - point >= least:
                stopped.append((point + gap, key + point, (cost + stop, (point, past))))
    return best


def _release(waiting: deque[tuple[int, int, _Way]], point: int, ways: dict[int, _Way]) -> None:
    while waiting and waiting[0][0] <= point:
        _, key, way = waiting.popleft()
        if key not in ways or way[0] < ways[key][0]:
            ways[key] = way


@dataclass(frozen=True)
class Downside:
    """Emissions of a schedule and of starting now under an alternative course of carbon intensity.

    Args:
        hours: description of the alternative intensity.
    """

    hours: str
    grams: float
    start_now_g: float

    @property
    def extra_g(self) -> float:
        """Grams more than starting now; negative if the schedule still saves."""
        return self.grams - self.start_now_g

    def describe(self) -> str:
        """Return `if yesterday's carbon intensity repeats: 130 g, 12 g more than starting now`."""
        than = f"{format_grams(abs(self.extra_g))} {'more' if self.extra_g > 0 else 'less'} than starting now"
        return f"{self.hours}: {format_grams(self.grams)}, {than}"


def downsides(
    taken: Sequence[PowerDraw], at_once: Sequence[PowerDraw], forecast: Intensity, now_s: float, end_s: float
) -> tuple[Downside, ...]:
    """Return the downside if yesterday repeats (if the trace has that day), then the worst case up to `end_s`.

    In the worst case, hours with a higher draw than starting now have the highest intensity of the forecast, and the
    remaining hours the lowest.
    """
    levels = [grams for *_, grams in forecast.spans(now_s, end_s)]
    cuts = sorted({moment for draw in (*taken, *at_once) for moment in draw[:2]})
    is_higher = [_watts(taken, cut) >= _watts(at_once, cut) for cut in cuts[:-1]]
    worst = tuple((cut, max(levels) if more else min(levels)) for cut, more in zip(cuts, is_higher, strict=False))
    traces = {
        "if yesterday's carbon intensity repeats": repeated_day(forecast, now_s, cuts[-1]),
        "in the worst case within the range of the forecast": Intensity(forecast.kind, worst, cuts[-1]),
    }
    return tuple(
        Downside(hours, grams_of(taken, trace), grams_of(at_once, trace)) for hours, trace in traces.items() if trace
    )


def _watts(taken: Sequence[PowerDraw], moment_s: float) -> float:
    return math.fsum(draw.watts for draw in taken if draw.begin_s <= moment_s < draw.end_s)


def repeated_day(forecast: Intensity, now_s: float, until_s: float) -> Intensity | None:
    """Return the naive forecast that repeats the last 24 hours; None if the trace does not contain them."""
    begin_s = now_s - DAY_S
    if not forecast.covers(begin_s, now_s):
        return None
    day = [(at_s - begin_s, grams) for at_s, _, grams in forecast.spans(begin_s, now_s)]
    days = [now_s + DAY_S * which for which in range(int((until_s - now_s) / DAY_S) + 1)]
    return Intensity(forecast.kind, tuple((at_s + after_s, g) for at_s in days for after_s, g in day), days[-1] + DAY_S)


@dataclass(frozen=True)
class CarbonSchedule:
    """Training schedule with its expected emissions.

    Args:
        stretches: training periods, in order; time lost to a pause lies at the end of the pause.
        now_s: time of the decision, in seconds since 1970.
        work_s: total training time in seconds.
        kind: type of intensity, "average" or "marginal"; None without a forecast.
        grams: forecast emissions of this schedule from now on; None if unknown.
        start_now_g: forecast emissions of starting now; None if unknown.
        downsides: emissions if the forecast is wrong; empty for starting now.
        reason: reason for this schedule.
        code: stable identifier of the reason, such as "carbon.later" or "carbon.no_forecast".
    """

    stretches: tuple[TrainingPeriod, ...]
    now_s: float
    work_s: float
    kind: str | None
    grams: float | None
    start_now_g: float | None
    downsides: tuple[Downside, ...]
    reason: str
    code: str = ""

    @property
    def is_start_now(self) -> bool:
        """True if training starts at once and runs in one piece."""
        return len(self.stretches) == 1 and self.stretches[0].begin_s == self.now_s

    @property
    def saved_g(self) -> float | None:
        """Grams less than starting now, by the forecast."""
        return None if self.grams is None or self.start_now_g is None else self.start_now_g - self.grams

    @property
    def saved_share(self) -> float | None:
        """Saving as a fraction of the emissions of starting now."""
        if not self.saved_g or not self.start_now_g:  # None or 0
            return self.saved_g
        return self.saved_g / self.start_now_g

    def describe(self) -> str:
        """Return the schedule, its expected saving and its downsides in words."""
        if self.grams is None or self.saved_share is None:
            return f"start now: {self.reason}"
        found = f"forecast {format_grams(self.grams)} CO2e ({self.kind} carbon intensity)"
        if self.is_start_now:
            return f"start now: {self.reason}; {found}"
        saved = f"{found}, {100 * self.saved_share:.3g}% less than starting now ({format_grams(self.start_now_g)})"
        return "; ".join((self.reason, saved, *(each.describe() for each in self.downsides)))


def when_to_train(
    forecast: Intensity | None,
    job: TrainingJob,
    now_s: float,
    deadline_s: float,
    *,
    least_saving: float = LEAST_SAVING,
    unknown: str = "no forecast is available",
) -> CarbonSchedule:
    """Return the schedule of least emissions that ends by the deadline.

    A later start must save at least `least_saving` of the emissions of starting now. Pausing must save the same amount
    again in addition.

    Args:
        forecast: carbon intensity; None if unavailable. Hours beyond the forecast are never used.
        now_s: current time, in seconds since 1970.
        deadline_s: deadline, in seconds since 1970.
        least_saving: fraction; 0: any saving above rounding counts.
        unknown: reason to report if there is no forecast.

    Raises:
        ValueGivenError: an invalid time or fraction.
    """
    number("now_s", now_s)
    number("deadline_s", deadline_s)
    least = max(TIE, number("least_saving", least_saving, low=0, high=1))
    at_once = (TrainingPeriod(now_s, now_s + job.seconds),)
    end_s, start_now_g = at_once[0].end_s, None
    if forecast is not None and forecast.covers(now_s, end_s):
        start_now_g = grams_of(power_draws(job, now_s, at_once), forecast)
    kind = None if forecast is None else forecast.kind
    plain = CarbonSchedule(at_once, now_s, job.seconds, kind, start_now_g, start_now_g, (), "")
    if deadline_s < end_s:
        text = f"no schedule meets the deadline; starting now ends {format_seconds(end_s - deadline_s)} after it"
        return replace(plain, reason=text, code="carbon.deadline_missed")
    if forecast is None:
        return replace(plain, reason=unknown, code="carbon.no_forecast")
    if start_now_g is None:
        known = f"{format_moment(forecast.steps[0][0])} to {format_moment(forecast.until_s)}"
        text = f"the forecast ({known}) does not cover the whole run"
        return replace(plain, reason=text, code="carbon.forecast_too_short")
    return _cleanest(plain, start_now_g, forecast, job, deadline_s, least)


def _cleanest(
    plain: CarbonSchedule, start_now_g: float, forecast: Intensity, job: TrainingJob, deadline_s: float, least: float
) -> CarbonSchedule:
    """Return starting now, a delay or periods, each only if it saves enough relative to those before."""
    now_s, end_s = plain.now_s, min(deadline_s, forecast.until_s)
    hours = IntensitySteps(forecast, now_s, end_s)
    best, best_g, lowest_g = plain.stretches, start_now_g, start_now_g
    for stretches in (_delayed(hours, job), best_stretches(hours, job) or best):
        found_g = grams_of(power_draws(job, now_s, stretches), forecast)
        lowest_g = min(lowest_g, found_g)
        if found_g < best_g and best_g - found_g >= least * start_now_g:
            best, best_g = stretches, found_g
    unknown = f"; the forecast ends at {format_moment(end_s)}, before the deadline" if end_s < deadline_s else ""
    if best is plain.stretches:
        saves = 100 * (1 - lowest_g / start_now_g) if start_now_g else 0.0
        most = f" (the best saves {saves:.2g}%)" if saves > 100 * TIE else ""
        enough = f"{100 * least:.2g}% of the emissions" if least > TIE else "emissions"
        return replace(plain, reason=f"no other schedule saves {enough}{most}{unknown}", code="carbon.no_saving")
    taken, at_once = (power_draws(job, now_s, each) for each in (best, plain.stretches))
    doubt = downsides(taken, at_once, forecast, now_s, end_s)
    waits = f"start in {format_seconds(best[0].begin_s - now_s)}" if best[0].begin_s > now_s else "start now"
    pieces = "without a pause" if len(best) == 1 else f"in {len(best)} periods"
    reason = f"{waits}, {pieces}, end at {format_moment(best[-1].end_s)}{unknown}"
    return replace(plain, stretches=best, grams=best_g, downsides=doubt, reason=reason, code="carbon.later")


def _delayed(hours: IntensitySteps, job: TrainingJob) -> tuple[TrainingPeriod, ...]:
    """Return the single period of least emissions, at a step of the forecast; the earliest of equal ones."""
    work, end = microseconds(job.seconds), hours.points[-1]
    begins = {point - shift for point in hours.points for shift in (0, work)}
    best, best_cost = 0, job.watts * hours.total(work)
    for begin in sorted(begin for begin in begins if 0 < begin <= end - work):
        before, after = hours.total(begin), hours.total(begin + work)
        cost = job.waiting_watts * before + job.watts * (after - before)
        if cost < best_cost * (1 - TIE):
            best, best_cost = begin, cost
    return (TrainingPeriod(hours.moment(best), hours.moment(best + work)),)
