"""Carbon-aware training schedule: start now, later, or train in several periods.

Starting now is the baseline, and the result if the forecast is insufficient.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trimtab.carbon.intensity import JOULES_PER_KWH, Intensity
from trimtab.carbon.job import PowerDraw, TrainingJob, TrainingPeriod, grams_of, power_draws
from trimtab.core.units import format_grams, format_moment, format_seconds
from trimtab.core.validation import number

# Time axis of a carbon schedule, in whole microseconds from now: sums and comparisons are exact.

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
        points: microseconds since the begin: 0, the steps of the intensity, and the end.
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


# Optimal training periods under a stepwise carbon intensity, if every pause has a cost.

# Minimum relative cost of a pause: among schedules of equal cost, the one with fewer pauses wins.
TIE = 1e-9
Moments = Callable[[int], float]


class PastPeriods(NamedTuple):
    """Linked list of training periods so far, the last first; begin and end are points."""

    begin: int
    end: int
    before: PastPeriods | None


class PartialSchedule(NamedTuple):
    """Partial schedule: its cost, the begin of the current period, and the periods before."""

    cost: float
    begin: int
    past: PastPeriods | None


@dataclass(frozen=True)
class TimeAxisPass:
    """The time axis in one direction; costs are in W g s / kWh.

    Args:
        points: moments at which a pause may begin or end.
        starts: cost of starting the job at a point.
        ends: cost of ending the job at a point.
        pauses: cost of beginning a pause at a point, in addition to idling.
        resumes: cost of ending a pause at a point, in addition to idling.
    """

    points: Sequence[int]
    total: Moments
    starts: Moments
    ends: Moments
    pauses: Moments
    resumes: Moments
    train_w: float
    idle_w: float


def best_stretches(hours: IntensitySteps, job: TrainingJob) -> tuple[TrainingPeriod, ...] | None:
    """Return the periods of least emissions in `hours`; None if the job does not fit or may not be paused."""
    if job.pause is None:
        return None
    work, gap = microseconds(job.seconds), max(1, microseconds(job.pause.seconds))
    least = max(1, microseconds(job.pause.least_stretch_s))
    forwards = _walked(_forwards(hours, job), work, least, gap)
    backwards = _walked(_backwards(_forwards(hours, job)), work, least, gap)
    # Both searches include the job in one piece, so both fail only if it does not fit.
    if forwards is None or backwards is None:
        return None
    spans = _spans(forwards[1])
    if backwards[0] < forwards[0]:
        spans = [(-end, -begin) for begin, end in reversed(_spans(backwards[1]))]
    return tuple(TrainingPeriod(hours.moment(begin), hours.moment(end)) for begin, end in spans)


def _forwards(hours: IntensitySteps, job: TrainingJob) -> TimeAxisPass:
    pause = job.pause
    assert pause is not None
    least_cost = TIE * job.watts * hours.total(hours.points[-1])
    lost = microseconds(pause.seconds)
    more_w = pause.watts - pause.idle_watts

    def resumes(point: int) -> float:
        return least_cost + more_w * (hours.total(point) - hours.total(max(0, point - lost)))

    def starts(point: int) -> float:
        return job.waiting_watts * hours.total(point)

    points = moments_to_pause(hours.points)
    return TimeAxisPass(points, hours.total, starts, _nothing, _nothing, resumes, job.watts, pause.idle_watts)


def _backwards(walk: TimeAxisPass) -> TimeAxisPass:
    def turned(cost: Moments, sign: int = 1) -> Moments:
        return lambda point: sign * cost(-point)

    return TimeAxisPass(
        points=[-point for point in reversed(walk.points)],
        total=turned(walk.total, -1),
        starts=turned(walk.ends),
        ends=turned(walk.starts),
        pauses=turned(walk.resumes),
        resumes=turned(walk.pauses),
        train_w=walk.train_w,
        idle_w=walk.idle_w,
    )


def _nothing(_: int) -> float:
    return 0.0


def _walked(walk: TimeAxisPass, work: int, least: int, gap: int) -> tuple[float, PastPeriods] | None:
    """Return the least cost and the periods of the cheapest schedule; None if `work` microseconds do not fit.

    Training states are stored under work done minus the current point, and paused states under work done; neither key
    changes with time. Costs are stored minus the cost of training or idling up to the point, so a state is stored once.
    Periods take at least `least` microseconds, and pauses `gap`.
    """
    best: tuple[float, PastPeriods] | None = None
    training: dict[int, PartialSchedule] = {}
    paused: dict[int, PartialSchedule] = {}
    # by the index from which they are long enough
    long_enough: defaultdict[int, list[tuple[int, PartialSchedule]]] = defaultdict(list)
    rested: defaultdict[int, list[tuple[int, PartialSchedule]]] = defaultdict(list)
    for index, point in enumerate(walk.points):
        total = walk.total(point)
        _keep(training, long_enough.pop(index, []))
        _keep(paused, rested.pop(index, []))
        back = walk.idle_w * total + walk.resumes(point)
        begun = [(0, walk.starts(point), None), *((done, way.cost + back, way.past) for done, way in paused.items())]
        for done, cost, past in begun:
            end = point + work - done
            if end > walk.points[-1]:
                continue
            cost -= walk.train_w * total
            whole = cost + walk.train_w * walk.total(end) + walk.ends(end)
            if best is None or whole < best[0]:
                best = whole, PastPeriods(point, end, past)
            from_index = bisect.bisect_left(walk.points, point + least)
            long_enough[from_index].append((done - point, PartialSchedule(cost, point, past)))
        stop = walk.train_w * total - walk.idle_w * total + walk.pauses(point)
        from_index = bisect.bisect_left(walk.points, point + gap)
        for key, way in training.items():
            if work - key - point >= least:
                stopped = PartialSchedule(way.cost + stop, 0, PastPeriods(way.begin, point, way.past))
                rested[from_index].append((key + point, stopped))
    return best


def _keep(ways: dict[int, PartialSchedule], found: list[tuple[int, PartialSchedule]]) -> None:
    for key, way in found:
        if key not in ways or way.cost < ways[key].cost:
            ways[key] = way


def _spans(past: PastPeriods | None) -> list[tuple[int, int]]:
    spans = []
    while past is not None:
        spans.append((past.begin, past.end))
        past = past.before
    return spans[::-1]


# Downsides of a carbon schedule: emissions compared with starting now, if the forecast is wrong.

DAY_S = 86400.0


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
    """Return the downside if yesterday repeats (if the trace has that day), then the worst case up to `end_s`."""
    found = []
    yesterday = repeated_day(forecast, now_s, max(draw.end_s for draw in (*taken, *at_once)))
    if yesterday is not None:
        found.append(
            Downside(
                "if yesterday's carbon intensity repeats", grams_of(taken, yesterday), grams_of(at_once, yesterday)
            )
        )
    levels = [grams for begin_s, until_s, grams in forecast.spans() if begin_s < end_s and until_s > now_s]
    return (*found, _worst(taken, at_once, levels))


def repeated_day(forecast: Intensity, now_s: float, until_s: float) -> Intensity | None:
    """Return the naive forecast that repeats the last 24 hours; None if the trace does not contain them."""
    begin_s = now_s - DAY_S
    if forecast.steps[0][0] > begin_s or forecast.until_s < now_s:
        return None
    known = [(max(at, begin_s) - begin_s, g) for at, end, g in forecast.spans() if end > begin_s]
    day = [(after_s, g) for after_s, g in known if after_s < DAY_S]
    num_days = int((until_s - now_s) / DAY_S) + 1
    repeated = tuple((now_s + DAY_S * which + after_s, g) for which in range(num_days) for after_s, g in day)
    return Intensity(forecast.kind, repeated, now_s + DAY_S * num_days)


def _worst(taken: Sequence[PowerDraw], at_once: Sequence[PowerDraw], levels: Sequence[float]) -> Downside:
    """Return the worst case for the schedule if every hour has some intensity of the forecast's range.

    Hours with a higher draw than starting now have the highest intensity, and the remaining hours the lowest.
    """
    cuts = sorted({moment for draw in (*taken, *at_once) for moment in draw[:2]})
    grams, start_now_g = [], []
    for begin_s, end_s in itertools.pairwise(cuts):
        schedule_w, now_w = _watts(taken, begin_s), _watts(at_once, begin_s)
        per_kwh = max(levels) if schedule_w >= now_w else min(levels)
        grams.append(schedule_w * (end_s - begin_s) / JOULES_PER_KWH * per_kwh)
        start_now_g.append(now_w * (end_s - begin_s) / JOULES_PER_KWH * per_kwh)
    return Downside("in the worst case within the range of the forecast", math.fsum(grams), math.fsum(start_now_g))


def _watts(taken: Sequence[PowerDraw], moment_s: float) -> float:
    return math.fsum(draw.watts for draw in taken if draw.begin_s <= moment_s < draw.end_s)


# Least relative saving that justifies waiting: forecasts have larger errors.
LEAST_SAVING = 0.01


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
        if self.saved_g is None or self.start_now_g is None:
            return None
        return self.saved_g / self.start_now_g if self.start_now_g > 0 else 0.0

    def describe(self) -> str:
        """Return the schedule, its expected saving and its downsides in words."""
        if self.grams is None or self.start_now_g is None:
            return f"start now: {self.reason}"
        found = f"forecast {format_grams(self.grams)} CO2e ({self.kind} carbon intensity)"
        if self.is_start_now:
            return f"start now: {self.reason}; {found}"
        share = f"{100 * (self.saved_share or 0):.3g}%"
        saved = f"{found}, {share} less than starting now ({format_grams(self.start_now_g)})"
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
    at_once = TrainingPeriod(now_s, now_s + job.seconds)
    start_now_g = _known(forecast, job, at_once)
    plain = CarbonSchedule(
        (at_once,), now_s, job.seconds, forecast.kind if forecast else None, start_now_g, start_now_g, (), ""
    )
    if deadline_s < at_once.end_s:
        late = format_seconds(at_once.end_s - deadline_s)
        text = f"no schedule meets the deadline; starting now ends {late} after it"
        return replace(plain, reason=text, code="carbon.deadline_missed")
    if forecast is None:
        return replace(plain, reason=unknown, code="carbon.no_forecast")
    if start_now_g is None:
        known = f"{format_moment(forecast.steps[0][0])} to {format_moment(forecast.until_s)}"
        text = f"the forecast ({known}) does not cover the whole run"
        return replace(plain, reason=text, code="carbon.forecast_too_short")
    return _least(plain, forecast, job, min(deadline_s, forecast.until_s), deadline_s, least)


def _least(
    plain: CarbonSchedule, forecast: Intensity, job: TrainingJob, end_s: float, deadline_s: float, least: float
) -> CarbonSchedule:
    hours = hours_of(forecast, plain.now_s, end_s)
    start_now_g = best_g = most_g = plain.grams or 0.0
    best = plain.stretches
    for stretches in (_delayed(hours, job), best_stretches(hours, job)):
        if stretches is None:
            continue
        found_g = grams_of(power_draws(job, plain.now_s, stretches), forecast)
        most_g = min(most_g, found_g)
        if found_g < best_g and best_g - found_g >= least * start_now_g:
            best, best_g = stretches, found_g
    unknown = f"; the forecast ends at {format_moment(end_s)}, before the deadline" if end_s < deadline_s else ""
    if best is plain.stretches:
        saves = 100 * (1 - most_g / start_now_g) if start_now_g else 0.0
        most = f" (the best saves {saves:.2g}%)" if saves > 100 * TIE else ""
        enough = f"{100 * least:.2g}% of the emissions" if least > TIE else "emissions"
        text = f"no other schedule saves {enough}{most}{unknown}"
        return replace(plain, reason=text, code="carbon.no_saving")
    taken, at_once = (power_draws(job, plain.now_s, each) for each in (best, plain.stretches))
    doubt = downsides(taken, at_once, forecast, plain.now_s, end_s)
    reason = _what(best, plain.now_s) + unknown
    return CarbonSchedule(
        best, plain.now_s, job.seconds, plain.kind, best_g, start_now_g, doubt, reason, "carbon.later"
    )


def _delayed(hours: IntensitySteps, job: TrainingJob) -> tuple[TrainingPeriod, ...]:
    """Return the single period of least emissions, at a step of the forecast; the earliest of equal ones."""
    work, end = microseconds(job.seconds), hours.points[-1]
    begins = {point - shift for point in hours.points for shift in (0, work)} | {0}
    best, best_cost = 0, job.watts * hours.total(work)
    for begin in sorted(begin for begin in begins if 0 < begin <= end - work):
        before, after = hours.total(begin), hours.total(begin + work)
        cost = job.waiting_watts * before + job.watts * (after - before)
        if cost < best_cost * (1 - TIE):
            best, best_cost = begin, cost
    return (TrainingPeriod(hours.moment(best), hours.moment(best + work)),)


def _known(forecast: Intensity | None, job: TrainingJob, at_once: TrainingPeriod) -> float | None:
    if forecast is None or not forecast.steps[0][0] <= at_once.begin_s < at_once.end_s <= forecast.until_s:
        return None
    return grams_of(power_draws(job, at_once.begin_s, (at_once,)), forecast)


def _what(stretches: Sequence[TrainingPeriod], now_s: float) -> str:
    first, last = stretches[0], stretches[-1]
    waits = f"start in {format_seconds(first.begin_s - now_s)}" if first.begin_s > now_s else "start now"
    pieces = "without a pause" if len(stretches) == 1 else f"in {len(stretches)} periods"
    return f"{waits}, {pieces}, end at {format_moment(last.end_s)}"
