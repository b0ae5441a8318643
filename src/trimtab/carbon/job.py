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
from trimtab.core.errors import ValueGivenError
from trimtab.core.units import format_seconds
from trimtab.core.validation import number
from trimtab.plans.plan import Plan


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
    """Return the emissions of draws in grams of CO2 equivalent; `ValueGivenError` if an intensity is unknown."""
    return math.fsum(
        draw.watts * (draw.end_s - draw.begin_s) / JOULES_PER_KWH * intensity.mean(draw.begin_s, draw.end_s)
        for draw in taken
    )


# Remaining work of a run for carbon scheduling: duration from a plan's step time, and power.

ASSUMED_W = 1000.0
_UNKNOWN_IDLE = "power while waiting is unknown and not counted"


@dataclass(frozen=True)
class MachinePower:
    """Power of a machine.

    Args:
        known: source of the figures, in words.
    """

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
        power, pause = self.power, None
        if self.pause_s is not None:
            pause = PauseCost(self.pause_s, self.pause_s * power.watts, power.idle_watts)
        start_s = (self.pause_s or 0.0) if done else 0.0
        return TrainingJob((self.steps - done) * self.step_s + start_s, power.watts, power.idle_watts, pause)

    def describe(self, done: int) -> dict[str, str]:
        """Return the remaining work, power and pause cost in words."""
        left = self.steps - done
        each = f"{left} steps of {format_seconds(self.step_s)} ({self.seconds_by})"
        pause = {} if self.pause_s is None else {"pause": f"each pause costs {format_seconds(self.pause_s)} (given)"}
        return {"work": f"{format_seconds(left * self.step_s)}: {each}", "power": self.power.known, **pause}


def step_seconds(plan: Plan | None, steps: int, takes_s: float | None) -> tuple[float, str]:
    """Return the seconds per step and their source: the given run time, else the plan's; `ValueGivenError` without."""
    if takes_s is not None:
        return takes_s / steps, "from the given duration of the run"
    found = _cost(plan)
    if found is None:
        raise ValueGivenError(
            "--when-clean",
            got="no step time",
            problem="--when-clean needs the duration of the run, and the plan has no step time.",
            hint="Pass the duration with --takes, such as --takes 5h, or a measured plan.",
            code="carbon.duration_unknown",
        )
    how = "measured" if plan is not None and plan.measured is not None else "predicted"
    return found.step_s, f"{how} by the plan, without evaluations"


def power_of(plan: Plan | None, watts: float | None, idle_watts: float | None) -> MachinePower:
    """Return the power for emissions: as given, else from the plan's meter, else 1 kW.

    Raises `ValueGivenError` if `idle_watts` is given, but the power while training is unknown.
    """
    if watts is not None:
        idle = _UNKNOWN_IDLE if idle_watts is None else f"{idle_watts:g} W while waiting (given)"
        return MachinePower(watts, idle_watts or 0.0, f"{watts:g} W (given); {idle}")
    found = _cost(plan)
    if plan is not None and found is not None and found.energy_j is not None:
        watts, given = found.energy_j / found.step_s, "" if idle_watts is None else " (given)"
        idle_w = plan.meter.idle_w if idle_watts is None else idle_watts
        idle = _UNKNOWN_IDLE if idle_w is None else f"{idle_w:.3g} W while waiting{given}"
        return MachinePower(watts, idle_w or 0.0, f"{watts:.3g} W ({plan.meter.provenance} during planning); {idle}")
    if idle_watts is not None:
        raise ValueGivenError(
            "--idle-watts",
            got=f"{idle_watts:g}",
            problem=f"--idle-watts {idle_watts:g} needs the power while training, which is unknown.",
            hint="Pass --energy-watts too, or a plan with measured energy.",
            code="carbon.power_unknown",
        )
    known = (
        f"unknown: emissions assume {ASSUMED_W:g} W while training and none while waiting; relative savings are valid"
    )
    return MachinePower(ASSUMED_W, 0.0, known)


def _cost(plan: Plan | None) -> MeasuredCost | None:
    return None if plan is None else plan.measured or plan.predicted
