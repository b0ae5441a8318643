"""Carbon-aware training schedule: start now, later, or train in several periods.

Starting now is the baseline, and the result if the forecast is insufficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.carbon import Intensity
from trimtab.core.datetimes import format_moment
from trimtab.core.units import format_grams, format_seconds
from trimtab.core.validation import number
from trimtab.decide.carbon_job import TrainingJob, TrainingPeriod, grams_of, power_draws
from trimtab.decide.carbon_pause_schedule import TIE, best_stretches
from trimtab.decide.carbon_sensitivity import Downside, downsides
from trimtab.decide.carbon_time_axis import IntensitySteps, hours_of, microseconds

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

    @property
    def downside_g(self) -> float:
        """Grams more than starting now in the worst of the downsides; 0 for starting now."""
        if self.is_start_now:  # Two summation orders may differ in the last bits.
            return 0.0
        return max((each.extra_g for each in self.downsides), default=0.0)

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
        job: training job.
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
    """Return the best of starting now, later, and in several periods, with each worth its extra delay."""
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
    """Return the single training period of least emissions; the earliest of equal ones.

    Emissions are linear in the begin while neither end crosses a step, so the minimum is at a step.
    """
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
