"""What a schedule comes to if its forecast is wrong, beside starting now under the same hours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.carbon import JOULES_PER_KWH, Intensity
from trimtab.core.units import format_grams
from trimtab.decide.carbon_job import Draw, grams_of

DAY_S = 86400.0


@dataclass(frozen=True)
class Downside:
    """Grams of a schedule and of starting now, under hours that are not those of the forecast.

    Args:
        hours: what the hours are then, in words. grams: of the schedule. start_now_g: of starting now.
    """

    hours: str
    grams: float
    start_now_g: float

    @property
    def extra_g(self) -> float:
        """Grams more than starting now; below zero where it still saves."""
        return self.grams - self.start_now_g

    def describe(self) -> str:
        """Return `if yesterday repeats: 130 g, 12 g more than starting now`."""
        than = f"{format_grams(abs(self.extra_g))} {'more' if self.extra_g > 0 else 'less'} than starting now"
        return f"{self.hours}: {format_grams(self.grams)}, {than}"


def downsides(
    taken: Sequence[Draw], at_once: Sequence[Draw], forecast: Intensity, now_s: float, end_s: float
) -> tuple[Downside, ...]:
    """Return what a schedule comes to if yesterday repeats, where the trace holds it, and then the worst there is.

    Args:
        taken, at_once: of the schedule, and of starting now. end_s: up to which the forecast was looked at.
    """
    found = []
    yesterday = repeated_day(forecast, now_s, max(draw.end_s for draw in (*taken, *at_once)))
    if yesterday is not None:
        found.append(Downside("if yesterday repeats", grams_of(taken, yesterday), grams_of(at_once, yesterday)))
    return (*found, _worst(taken, at_once, _levels(forecast, now_s, end_s)))


def repeated_day(forecast: Intensity, now_s: float, until_s: float) -> Intensity | None:
    """Return the naive forecast, by which the day before now repeats; None where the trace does not hold that day."""
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


def _worst(taken: Sequence[Draw], at_once: Sequence[Draw], levels: Sequence[float]) -> Downside:
    """Return the most that a schedule can lose while every hour has an intensity that the forecast has somewhere.

    Where it takes more than starting now would, that is the highest; elsewhere the lowest. An hour that both use has
    one intensity for both.
    """
    cuts = sorted({moment for draw in (*taken, *at_once) for moment in draw[:2]})
    grams, start_now_g = [], []
    for begin_s, end_s in itertools.pairwise(cuts):
        schedule_w, now_w = _watts(taken, begin_s), _watts(at_once, begin_s)
        per_kwh = max(levels) if schedule_w >= now_w else min(levels)
        grams.append(schedule_w * (end_s - begin_s) / JOULES_PER_KWH * per_kwh)
        start_now_g.append(now_w * (end_s - begin_s) / JOULES_PER_KWH * per_kwh)
    return Downside("at worst within the forecast's range", math.fsum(grams), math.fsum(start_now_g))


def _watts(taken: Sequence[Draw], moment_s: float) -> float:
    return math.fsum(draw.watts for draw in taken if draw.begin_s <= moment_s < draw.end_s)


def _levels(forecast: Intensity, begin_s: float, end_s: float) -> list[float]:
    ends = [time_s for time_s, _ in forecast.steps[1:]] + [forecast.until_s]
    return [g for (at, g), end in zip(forecast.steps, ends, strict=True) if at < end_s and end > begin_s]
