"""Remaining work of a run for carbon scheduling: duration from a plan's step time, and power.

If the power is unknown, emissions assume 1 kW while training. All emissions are then wrong by the same factor, so
relative savings and the chosen schedule are unaffected.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.units import format_seconds
from trimtab.decide.carbon_job import PauseCost, TrainingJob

ASSUMED_W = 1000.0
_UNKNOWN_IDLE = "power while waiting is unknown and not counted"


@dataclass(frozen=True)
class MachinePower:
    """Power of a machine.

    Args:
        watts: while training.
        idle_watts: while waiting.
        known: source of the figures, in words.
    """

    watts: float
    idle_watts: float
    known: str


@dataclass(frozen=True)
class RemainingWork:
    """Duration and power of a run.

    Args:
        steps: steps of the whole run.
        step_s: seconds per step.
        seconds_by: source of the step time, in words.
        power: power of the machine.
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
    """Return the seconds per step and their source: the given run time, else the plan's figures.

    Args:
        plan: plan with measured or predicted step time.
        steps: steps of the whole run.
        takes_s: given seconds of the whole run.

    Raises:
        ValueGivenError: neither source has a time.
    """
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

    Args:
        plan: plan with an energy measurement.
        watts: given power while training; None if not given.
        idle_watts: given power while waiting; None if not given.

    Raises:
        ValueGivenError: `idle_watts` is given, but the power while training is unknown.
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
