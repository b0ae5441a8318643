"""A training job for carbon scheduling: duration, power, and the cost of pauses.

Emissions are `sum over draws of watts x seconds / 3.6e6 x g_per_kwh`, with the mean intensity over each draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.carbon.intensity import JOULES_PER_KWH, Intensity
from trimtab.core.choice import MeasuredCost
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_seconds
from trimtab.core.validation import number

ASSUMED_W = 1000.0


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
        for name, value in vars(self).items():
            number(f"pause.{name}", value, low=0)
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
    found += [PowerDraw(*each, job.watts) for each in stretches]
    if job.pause is not None:
        for before, after in itertools.pairwise(stretches):
            lost_s = max(before.end_s, after.begin_s - job.pause.seconds)
            found.append(PowerDraw(before.end_s, lost_s, job.pause.idle_watts))
            found.append(PowerDraw(lost_s, after.begin_s, job.pause.watts))
    return tuple(draw for draw in found if draw.begin_s < draw.end_s and draw.watts)


def grams_of(taken: Iterable[PowerDraw], intensity: Intensity) -> float:
    """Return the emissions of draws in grams of CO2 equivalent; `ValueGivenError` if an intensity is unknown."""
    return math.fsum(
        draw.watts * (draw.end_s - draw.begin_s) / JOULES_PER_KWH * intensity.mean(draw.begin_s, draw.end_s)
        for draw in taken
    )


class MachinePower(NamedTuple):
    """Power of a machine while training and while waiting, and the source of the figures in words."""

    watts: float
    idle_watts: float
    known: str


@dataclass(frozen=True)
class RemainingWork:
    """Duration and power of a run.

    Args:
        seconds_by: source of the step time, in words.
        pause_s: seconds lost per pause; None: the run is not paused.
    """

    steps: int
    step_s: float
    seconds_by: str
    power: MachinePower
    pause_s: float | None = None

    def job(self, done: int) -> TrainingJob:
        """Return the remaining job after `done` steps; a resumed run begins with the seconds lost to a restart.

        The seconds lost to a pause draw as much power as training.
        """
        watts, idle_watts, _ = self.power
        pause = None if self.pause_s is None else PauseCost(self.pause_s, self.pause_s * watts, idle_watts)
        start_s = pause.seconds if pause and done else 0.0
        return TrainingJob((self.steps - done) * self.step_s + start_s, watts, idle_watts, pause)

    def describe(self, done: int) -> dict[str, str]:
        """Return the remaining work, power and pause cost in words."""
        left = self.steps - done
        each = f"{left} steps of {format_seconds(self.step_s)} ({self.seconds_by})"
        pause = {} if self.pause_s is None else {"pause": f"each pause costs {format_seconds(self.pause_s)} (given)"}
        return {"work": f"{format_seconds(left * self.step_s)}: {each}", "power": self.power.known, **pause}


def step_seconds(
    steps: int, takes_s: float | None, measured: MeasuredCost | None = None, predicted: MeasuredCost | None = None
) -> tuple[float, str]:
    """Return the seconds per step, by the given duration or a plan's cost, and their source; else `ValueGivenError`."""
    if takes_s is not None:
        return takes_s / steps, "from the given duration of the run"
    for cost, how in ((measured, "measured"), (predicted, "predicted")):
        if cost is not None:
            return cost.step_s, f"{how} by the plan, without evaluations"
    problem = "--when-clean needs the duration of the run, and the plan has no step time."
    hint = "Pass the duration with --takes, such as --takes 5h, or a measured plan."
    raise ValueGivenError("--when-clean", problem=problem, hint=hint, code="carbon.duration_unknown")


def power_of(
    watts: float | None, idle_watts: float | None, cost: MeasuredCost | None = None, meter: MeterFacts = NO_METER
) -> MachinePower:
    """Return the power for emissions: as given, else from a plan's cost and meter, else 1 kW.

    Raises:
        ValueGivenError: `idle_watts` is given, but the power while training is unknown.
    """
    known_idle = None
    if watts is not None:
        known = f"{watts:g} W (given)"
    elif cost is not None and cost.energy_j is not None:
        watts, known_idle = cost.energy_j / cost.step_s, meter.idle_w
        known = f"{watts:.3g} W ({meter.provenance} during planning)"
    elif idle_watts is None:
        assumed = f"unknown: emissions assume {ASSUMED_W:g} W while training and none while waiting"
        return MachinePower(ASSUMED_W, 0.0, f"{assumed}; relative savings are valid")
    else:
        problem = f"--idle-watts {idle_watts:g} needs the power while training, which is unknown."
        hint = "Pass --energy-watts too, or a plan with measured energy."
        raise ValueGivenError("--idle-watts", problem=problem, hint=hint, code="carbon.power_unknown")
    if idle_watts is not None:
        return MachinePower(watts, idle_watts, f"{known}; {idle_watts:g} W while waiting (given)")
    if known_idle is not None:
        return MachinePower(watts, known_idle, f"{known}; {known_idle:.3g} W while waiting")
    return MachinePower(watts, 0.0, f"{known}; power while waiting is unknown and not counted")
