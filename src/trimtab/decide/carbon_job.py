"""A run as a grid sees it: how long it trains, at which power, and what standing still in between takes.

Its carbon is `sum over draws of watts x seconds / 3.6e6 x g_per_kwh`, with the mean intensity over each draw's seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.core.carbon import JOULES_PER_KWH, Intensity
from trimtab.core.checks import number
from trimtab.core.errors import ValueGivenError


class Stretch(NamedTuple):
    """A time in which the job trains, in seconds since 1970."""

    begin_s: float
    end_s: float


class Draw(NamedTuple):
    """A time with one power, in seconds since 1970."""

    begin_s: float
    end_s: float
    watts: float


@dataclass(frozen=True)
class PauseCost:
    """What it takes to stop training, and to go on.

    Args:
        seconds: of writing a checkpoint, starting again and warming up, together; no pause is shorter. They are counted
            at the pause's end. joules: all that these seconds take. idle_watts: of what is held for the rest of it.
        least_stretch_s: seconds of training that are worth a start; no stretch of a job in stretches is shorter.

    Raises:
        ValueGivenError: one is below zero, or joules that no seconds take.
    """

    seconds: float
    joules: float
    idle_watts: float
    least_stretch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "joules", "idle_watts", "least_stretch_s"):
            number(f"pause.{name}", getattr(self, name), low=0)
        if self.joules and not self.seconds:
            expected = "the seconds that take them"
            raise ValueGivenError("pause.joules", given=f"{self.joules:g} J in 0 s", expected=expected)

    @property
    def watts(self) -> float:
        """Mean power of the seconds that are lost."""
        return self.joules / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TrainingJob:
    """What is to be trained.

    Args:
        seconds: of training. watts: while it trains. waiting_watts: of what is held until it starts.
        pause: what a pause takes; None: it runs in one piece.

    Raises:
        ValueGivenError: no seconds or watts, or waiting watts below zero.
    """

    seconds: float
    watts: float
    waiting_watts: float = 0.0
    pause: PauseCost | None = None

    def __post_init__(self) -> None:
        number("job.seconds", self.seconds, low=0, open_low=True)
        number("job.watts", self.watts, low=0, open_low=True)
        number("job.waiting_watts", self.waiting_watts, low=0)


def draws(job: TrainingJob, now_s: float, stretches: Sequence[Stretch]) -> tuple[Draw, ...]:
    """Return what a job takes from now to its end: waiting, training, and standing still in between."""
    found = [Draw(now_s, stretches[0].begin_s, job.waiting_watts)]
    found += [Draw(each.begin_s, each.end_s, job.watts) for each in stretches]
    if job.pause is not None:
        for before, after in itertools.pairwise(stretches):
            lost_s = max(before.end_s, after.begin_s - job.pause.seconds)
            found.append(Draw(before.end_s, lost_s, job.pause.idle_watts))
            found.append(Draw(lost_s, after.begin_s, job.pause.watts))
    return tuple(draw for draw in found if draw.begin_s < draw.end_s and draw.watts)


def grams_of(taken: Iterable[Draw], intensity: Intensity) -> float:
    """Return grams of CO2 equivalent.

    Raises:
        ValueGivenError: the intensity of some of the time is not known.
    """
    return math.fsum(
        draw.watts * (draw.end_s - draw.begin_s) / JOULES_PER_KWH * intensity.mean(draw.begin_s, draw.end_s)
        for draw in taken
    )
