"""Joules that planning takes: of all of it, beside the trials that read watts of their own."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from tiny_task import load_data, task

from trimtab.core.energy_reading import Provenance
from trimtab.energy.energy_meter import GivenWatts, MeterLost
from trimtab.energy.meter_selection import Metering
from trimtab.experiments.task_plans import PlanningMeter, make_plans
from trimtab.profiling import trials

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("brief_trials")


class Steady:
    """A meter of the user's own, of 50 W; loses itself on the readings that it is told to."""

    provenance, sources, period_s = Provenance.MEASURED, ("a plug",), math.inf

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost, self.reads = lost, 0

    def joules(self) -> float:
        self.reads += 1
        if self.reads in self.lost:
            raise MeterLost("unplugged")
        return 50.0 * time.perf_counter()


def planned(metering, **how):
    return make_plans(task, load_data(), CPU, strong=False, metering=metering, progress=lambda text: None, **how)


def test_each_plan_has_the_joules_of_its_seconds():
    found = planned(Metering(watts=80), adapt=("learning_rate",))
    for plan_kind, plan in found.plans.items():
        spent = found.energy[plan_kind]
        assert (spent.provenance, spent.joules) == (Provenance.ESTIMATED, pytest.approx(80 * spent.seconds, rel=1e-3))
        assert spent.seconds >= plan.planning_s * (1 - 1e-3)
    assert found.energy["tuned"].seconds > found.energy["equivalent"].seconds + 0.5 * found.plans["tuned"].search_s


def test_a_batch_that_is_freed_trains_on_nothing_and_takes_what_its_base_took():
    found = planned(Metering(watts=80), adapt=("batch",))
    assert found.energy["tuned"] == found.energy["equivalent"]


def test_a_meter_that_trials_read_too_tells_both_what_it_lost():
    meter = Steady()
    counter = PlanningMeter(CPU, Metering(meter=meter))
    theirs = counter.metering.meter

    def trial() -> str:
        meter.lost = (meter.reads + 1,)
        with pytest.raises(MeterLost, match="unplugged"):
            theirs.joules()
        return "made"

    made, spent = counter.counted(trial)
    assert (made, spent.joules, spent.reason) == ("made", None, "unplugged")
    made, spent = counter.counted(lambda: time.sleep(1.1))
    assert spent.joules == pytest.approx(50 * spent.seconds, rel=0.05)


def test_what_planning_reads_is_told_what_its_trials_lost(monkeypatch):
    """A final reads the meter itself, and what it lost then it tells nobody again."""
    monkeypatch.setattr(trials, "WINDOW_S", 0.01)
    said = []

    class Weighed(Steady):
        def joules(self) -> float:
            if said and said[-1].endswith("measuring power"):
                said.append("lost")
                raise MeterLost("unplugged")
            return super().joules()

    how = {"metering": Metering(meter=Weighed()), "progress": said.append}
    longer = replace(task, planned_samples=task.batch_size * 10**6)  # whose planning has time to read watts
    (spent,) = make_plans(longer, load_data(), CPU, adapt=(), strong=False, **how).energy.values()
    assert "lost" in said
    assert (spent.joules, spent.reason) == (None, "unplugged")


def test_a_meter_is_read_while_planning_goes_on_and_watts_that_are_given_by_nobody():
    meter = Steady()
    counter, said = PlanningMeter(CPU, Metering(meter=meter)), []

    def planning() -> None:
        before = meter.reads
        time.sleep(1.1)
        counter.heard(said.append)("trial 3")
        assert meter.reads == before + 1

    counter.counted(planning)
    assert said == ["trial 3"]
    # Trials know them as such, and run no second to read them.
    given = GivenWatts(50)
    assert PlanningMeter(CPU, Metering(meter=given)).metering.meter is given
    (spent,) = planned(None, adapt=()).energy.values()
    assert (spent.provenance, spent.joules) == (Provenance.ABSENT, None)
    assert spent.reason
