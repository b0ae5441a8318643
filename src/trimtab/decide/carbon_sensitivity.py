"""Downsides of a carbon schedule: emissions compared with starting now, if the forecast is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.carbon import JOULES_PER_KWH, Intensity
from trimtab.core.units import format_grams
from trimtab.decide.carbon_job import PowerDraw, grams_of

DAY_S = 86400.0


@dataclass(frozen=True)
class Downside:
    """Emissions of a schedule and of starting now under an alternative course of carbon intensity.

    Args:
        hours: description of the alternative intensity.
        grams: emissions of the schedule.
        start_now_g: emissions of starting now.
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
    """Return the downside if yesterday repeats (omitted if the trace lacks that day), then the worst case.

    Args:
        taken: draws of the schedule.
        at_once: draws of starting now.
        forecast: carbon intensity.
        now_s: time of the decision, in seconds since 1970.
        end_s: end of the time considered in the forecast.
    """
    found = []
    yesterday = repeated_day(forecast, now_s, max(draw.end_s for draw in (*taken, *at_once)))
    if yesterday is not None:
        found.append(
            Downside(
                "if yesterday's carbon intensity repeats", grams_of(taken, yesterday), grams_of(at_once, yesterday)
            )
        )
    return (*found, _worst(taken, at_once, _levels(forecast, now_s, end_s)))


def repeated_day(forecast: Intensity, now_s: float, until_s: float) -> Intensity | None:
    """Return the naive forecast that repeats the last 24 hours; None if the trace does not contain them."""
    begin_s = now_s - DAY_S
    if forecast.steps[0][0] > begin_s or forecast.until_s < now_s:
        return None
    steps = list(forecast.steps)
    ends = [time_s for time_s, _ in steps[1:]] + [forecast.until_s]
    day = [(max(at, begin_s) - begin_s, g) for (at, g), end in zip(steps, ends, strict=True) if end > begin_s]
    day = [(after_s, g) for after_s, g in day if after_s < DAY_S]
    num_days = int((until_s - now_s) / DAY_S) + 1
    repeated = tuple((now_s + DAY_S * which + after_s, g) for which in range(num_days) for after_s, g in day)
    return Intensity(forecast.kind, repeated, now_s + DAY_S * num_days)


def _worst(taken: Sequence[PowerDraw], at_once: Sequence[PowerDraw], levels: Sequence[float]) -> Downside:
    """Return the worst case for the schedule if every hour has some intensity of the forecast's range.

    Hours with a higher draw than starting now have the highest intensity, and the remaining hours the lowest. An hour
    used by both has the same intensity for both.
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


def _levels(forecast: Intensity, begin_s: float, end_s: float) -> list[float]:
    ends = [time_s for time_s, _ in forecast.steps[1:]] + [forecast.until_s]
    return [g for (at, g), end in zip(forecast.steps, ends, strict=True) if at < end_s and end > begin_s]
