"""What is left of a run as a grid sees it: how long it takes by a plan's seconds, and at which power.

Where watts are not known, grams are of a kilowatt while it trains: all of them are as many times too large or too
small, so the shares hold, and what is chosen stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.choice import Measured
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.units import format_seconds
from trimtab.decide.carbon_job import PauseCost, TrainingJob

ASSUMED_W = 1000.0


@dataclass(frozen=True)
class Power:
    """Watts of a machine.

    Args:
        watts: while it trains. idle_watts: of what is held while it waits. known: how, in words.
    """

    watts: float
    idle_watts: float
    known: str


@dataclass(frozen=True)
class Work:
    """What a run takes.

    Args:
        steps: of the whole run. step_s: seconds of one. seconds_by: how they are known, in words.
        pause_s: what a pause loses; None: it is not paused.
    """

    steps: int
    step_s: float
    seconds_by: str
    power: Power
    pause_s: float | None = None

    def job(self, done: int) -> TrainingJob:
        """Return what is left after so many steps; a run that is gone on with begins with what a start loses.

        A pause takes as much power as training, while it loses time.
        """
        power, pause = self.power, None
        if self.pause_s is not None:
            pause = PauseCost(self.pause_s, self.pause_s * power.watts, power.idle_watts)
        start_s = (self.pause_s or 0.0) if done else 0.0
        return TrainingJob((self.steps - done) * self.step_s + start_s, power.watts, power.idle_watts, pause)

    def describe(self, done: int) -> dict[str, str]:
        """Return what is said of it after so many steps."""
        left = self.steps - done
        each = f"{left} steps of {format_seconds(self.step_s)}, {self.seconds_by}"
        pause = {} if self.pause_s is None else {"pause": f"loses {format_seconds(self.pause_s)}, as given"}
        return {"work": f"{format_seconds(left * self.step_s)}: {each}", "power": self.power.known, **pause}


def step_seconds(plan: Plan | None, steps: int, takes_s: float | None) -> tuple[float, str]:
    """Return seconds a step, and how they are known: of a whole run as given, else the plan's.

    Raises:
        ValueGivenError: there are none.
    """
    if takes_s is not None:
        return takes_s / steps, "as given for the whole run"
    found = _cost(plan)
    if found is None:
        given, way_out = "a plan without seconds a step", "Say what the whole run takes: --takes 5h."
        raise ValueGivenError("--when-clean", given=given, expected="a plan that was measured", way_out=way_out)
    how = "measured" if plan is not None and plan.measured is not None else "predicted"
    return found.step_s, f"as the plan {how} them, without the evaluation"


def power_of(plan: Plan | None, watts: float | None, idle_watts: float | None) -> Power:
    """Return the power that grams are told by: as given, else as a plan's meter read it, else that of a kilowatt.

    Args:
        watts, idle_watts: as given; None where they were not.

    Raises:
        ValueGivenError: watts while it waits, and none while it trains.
    """
    if watts is not None:
        waits = "what it holds while it waits is not known, and not counted"
        idle = waits if idle_watts is None else f"{idle_watts:g} W while it waits, as given"
        return Power(watts, idle_watts or 0.0, f"{watts:g} W, as given; {idle}")
    found = _cost(plan)
    if plan is not None and found is not None and found.energy_j is not None:
        watts, given = found.energy_j / found.step_s, "" if idle_watts is None else ", as given"
        idle_w = plan.meter.idle_w if idle_watts is None else idle_watts
        idle = (
            "idle watts are not known, and not counted" if idle_w is None else f"{idle_w:.3g} W while it waits{given}"
        )
        return Power(watts, idle_w or 0.0, f"{watts:.3g} W, {plan.meter.provenance} as it was planned; {idle}")
    if idle_watts is not None:
        given, expected = "no --energy-watts, and no plan whose meter read them", "what it draws while it trains, too"
        raise ValueGivenError("--idle-watts", given=given, expected=expected)
    said = f"not known: grams are of {ASSUMED_W:g} W, shares hold for any; waiting is not counted"
    return Power(ASSUMED_W, 0.0, said)


def _cost(plan: Plan | None) -> Measured | None:
    return None if plan is None else plan.measured or plan.predicted
