"""A training job for carbon scheduling: duration, power, and the cost of pauses.

Emissions are `sum over draws of watts x seconds / 3.6e6 x g_per_kwh`, with the mean intensity over each draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.core.carbon import JOULES_PER_KWH, Intensity
from trimtab.core.errors import ValueGivenError
from trimtab.core.validation import number


class TrainingPeriod(NamedTuple):
    """Period of uninterrupted training, in seconds since 1970."""

    begin_s: float
    end_s: float


class PowerDraw(NamedTuple):
    """Period of constant power, in seconds since 1970."""

    begin_s: float
    end_s: float
    watts: float


@dataclass(frozen=True)
class PauseCost:
    """Cost of stopping and resuming training.

    Args:
        seconds: time to write a checkpoint, restart and warm up; also the least length of a pause. Counted at its end.
        joules: energy of these seconds.
        idle_watts: power of the machine during the rest of the pause.
        least_stretch_s: least seconds of training between two pauses.

    Raises:
        ValueGivenError: a value is negative, or `joules` is positive with zero `seconds`.
    """

    seconds: float
    joules: float
    idle_watts: float
    least_stretch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "joules", "idle_watts", "least_stretch_s"):
            number(f"pause.{name}", getattr(self, name), low=0)
        if self.joules and not self.seconds:
            given = f"{self.joules:g} J with pause.seconds=0"
            raise ValueGivenError("pause.joules", got=given, expected="0 J, or positive pause.seconds")

    @property
    def watts(self) -> float:
        """Mean power of the lost seconds."""
        return self.joules / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TrainingJob:
    """Amount of training work, its power, and its pause cost.

    Args:
        seconds: training time.
        watts: power while training.
        waiting_watts: power of the machine until the job starts.
        pause: cost of a pause; None: the job runs in one piece.

    Raises:
        ValueGivenError: `seconds` or `watts` is not positive, or `waiting_watts` is negative.
    """

    seconds: float
    watts: float
    waiting_watts: float = 0.0
    pause: PauseCost | None = None

    def __post_init__(self) -> None:
        number("job.seconds", self.seconds, low=0, open_low=True)
        number("job.watts", self.watts, low=0, open_low=True)
        number("job.waiting_watts", self.waiting_watts, low=0)


def power_draws(job: TrainingJob, now_s: float, stretches: Sequence[TrainingPeriod]) -> tuple[PowerDraw, ...]:
    """Return the draws of a job from now to its end: waiting, training and pauses."""
    found = [PowerDraw(now_s, stretches[0].begin_s, job.waiting_watts)]
    found += [PowerDraw(each.begin_s, each.end_s, job.watts) for each in stretches]
    if job.pause is not None:
        for before, after in itertools.pairwise(stretches):
            lost_s = max(before.end_s, after.begin_s - job.pause.seconds)
            found.append(PowerDraw(before.end_s, lost_s, job.pause.idle_watts))
            found.append(PowerDraw(lost_s, after.begin_s, job.pause.watts))
    return tuple(draw for draw in found if draw.begin_s < draw.end_s and draw.watts)


def grams_of(taken: Iterable[PowerDraw], intensity: Intensity) -> float:
    """Return the emissions of draws in grams of CO2 equivalent.

    Raises:
        ValueGivenError: the intensity is unknown for part of the time.
    """
    return math.fsum(
        draw.watts * (draw.end_s - draw.begin_s) / JOULES_PER_KWH * intensity.mean(draw.begin_s, draw.end_s)
        for draw in taken
    )
