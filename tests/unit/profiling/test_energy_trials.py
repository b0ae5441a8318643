"""Joules of trials: windows of a second beside the blocks, of every arm alike, and a loop that is left as it was."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import class_loss as mean_loss
from torch import nn

import trimtab
from trimtab import Metering
from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.energy import energy_meter, meter_selection
from trimtab.energy.energy_meter import MeterLost
from trimtab.measure import machine
from trimtab.planner.plan_choice import choose
from trimtab.planner.search import SearchPhase
from trimtab.plans.profile import ALONE, Candidate
from trimtab.profiling import trials
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.trials import TrialPower

pytestmark = pytest.mark.slow

ROWS = 8


class Steady:
    """A meter of a machine that always draws the same."""

    provenance, sources, period_s = Provenance.MEASURED, ("a steady one",), math.inf

    def __init__(self, watts: float = 40.0) -> None:
        self.watts, self.clock, self.lost = watts, energy_meter.time.perf_counter, False

    def joules(self) -> float:
        if self.lost:
            raise MeterLost("it is gone")
        return self.watts * self.clock()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Windows of ten milliseconds, as the meter here is exact."""
    monkeypatch.setattr(trials, "BLOCK_S", 1e-6)
    monkeypatch.setattr(trials, "_FAR_SLOWER", math.inf)  # however long a first step takes, its arm has blocks
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})
    for module in (trials, meter_selection):
        monkeypatch.setattr(module, "WINDOW_S", 0.01)
        monkeypatch.setattr(module, "EnergyClock", functools.partial(energy_meter.EnergyClock, window_s=0.01))


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,)))


def profiled(metering, **given):
    model, optimizer, batch = loop()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = trimtab.profile(model, optimizer, mean_loss, batch, num_blocks=3, metering=metering, **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    return found


def test_every_whole_trial_has_its_watts_where_energy_is_weighed():
    found = profiled(Metering(meter=Steady()), objective=Objective(energy=1))
    whole = [trial for trial in found.trials if trial.is_whole and trial.block_s]
    assert {"modes"} <= {trial.stage for trial in whole}
    for trial in whole:
        assert trial.watts == pytest.approx([40.0] * len(trial.watts), rel=0.2)
        assert trial.energy_j == pytest.approx(40.0 * trial.step_s, rel=0.2)
    assert [trial.watts for trial in found.trials if trial.stage == ALONE] == [(), (), ()]
    assert (found.meter.provenance, found.meter.sources) == (Provenance.MEASURED, ("a steady one",))
    assert found.meter.idle_w == pytest.approx(40.0, rel=0.2)
    assert choose(found, found.objective, found.budget).baseline.energy_j is not None


WHOLE = Candidate(ROWS)
FUSED = replace(WHOLE, fused_optimizer=True)


def run_stage(name: str, meter, *, is_asked: bool = True, patient: bool = True) -> list:
    """Return the trials of a stage of two candidates, and the first again."""
    model, optimizer, batch = loop()
    stage = SearchPhase(name, (WHOLE, FUSED), control=True, drops=False)
    how = {"power": TrialPower(meter, is_asked), "patient": patient}
    return list(trials.run_stage(TrainingLoop(model, optimizer, mean_loss, batch), stage, 3, lambda text: None, **how))


@pytest.mark.parametrize(
    ("stage", "is_asked", "patient", "windows"),
    [
        ("modes", True, True, 1),
        ("final", True, True, 5),
        ("final 2", True, False, 5),
        (ALONE, True, True, 0),
        ("modes", False, True, 0),
        ("final", False, True, 1),
        ("final", False, False, 0),
    ],
)
def test_windows_are_as_many_as_a_stage_needs(stage, is_asked, patient, windows):
    found = run_stage(stage, Steady(), is_asked=is_asked, patient=patient)
    assert [len(trial.watts) for trial in found] == [windows] * 3


def test_where_energy_does_not_count_no_second_is_waited_for():
    assert profiled(Metering(meter=Steady())).meter.idle_w is None
    assert profiled(Metering(meter=Steady()), budget=Budget(energy=1e9)).meter.idle_w is not None


@pytest.fixture
def in_windows(monkeypatch):
    """Return what sets what happens before each step that is metered: called with the run's settings."""
    watts, steps = TrialPower._watts, TrainingLoop.step

    def does(what) -> None:
        def step(subject, run):
            what(run.plan.fused_optimizer.value)
            return steps(subject, run)

        def metered(power, subject, arm):
            with monkeypatch.context() as patch:
                patch.setattr(TrainingLoop, "step", step)
                return watts(power, subject, arm)

        monkeypatch.setattr(TrialPower, "_watts", metered)

    return does


def test_a_step_that_raises_while_it_is_metered_is_that_arms_error(in_windows):
    def raises(fused: bool) -> None:
        if fused:
            raise RuntimeError("out of memory")

    in_windows(raises)
    own, rival, control = run_stage("final", Steady())
    assert rival.code == "trial.out_of_memory"
    assert (rival.block_s, rival.watts) == ((), ())
    assert [len(trial.watts) for trial in (own, control)] == [5, 5]
    assert (own.error, control.error) == (None, None)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_meter_that_is_lost_leaves_that_arm_without_joules_and_no_error(in_windows, is_own):
    meter = Steady()

    def loses(fused: bool) -> None:
        meter.lost = fused is not is_own

    in_windows(loses)
    own, rival, control = run_stage("final", meter)
    assert [len(trial.watts) for trial in (own, rival, control)] == ([0, 5, 0] if is_own else [5, 0, 5])
    assert all(trial.error is None and len(trial.block_s) >= 3 for trial in (own, rival, control))


def test_watts_that_were_given_take_no_window_and_are_said_to_be_estimates(monkeypatch):
    monkeypatch.setattr(trials, "EnergyClock", None)
    found = profiled(Metering(watts=90), objective=Objective(energy=1))
    assert {watts for trial in found.trials for watts in trial.watts} == {90.0}
    assert (found.meter.provenance, found.meter.idle_w) == (Provenance.ESTIMATED, None)
    page = choose(found, found.objective, found.budget).explain()
    assert "energy: estimated (90 W, as given)" in page


def test_without_a_meter_a_weight_is_refused_or_left_out_and_the_reason_is_known(tmp_path):
    root = tmp_path / "powercap"
    with raises(ValueGivenError, code="energy.no_meter", field="energy") as caught:
        profiled(Metering(root=root), objective=Objective(energy=1))
    assert str(root) in str(caught.value)
    found = profiled(Metering(root=root, without="renormalise"), objective=Objective(time=1, energy=1))
    assert found.objective == Objective()
    assert found.meter.left_out == 0.5
    assert all(trial.watts == () for trial in found.trials)
    assert "Its weight of 0.5 in the objective was set to 0" in choose(found, found.objective, found.budget).explain()
    with raises(ValueGivenError, code="energy.no_meter", field="energy"):
        profiled(Metering(root=root, without="renormalise"), budget=Budget(energy=1.0))
    found = profiled(Metering(root=root))
    assert found.meter.is_absent
    assert all(trial.energy_j is None for trial in found.trials)


@pytest.mark.parametrize("failure", [MeterLost("it is gone"), OSError("no such device")])
def test_a_meter_that_is_lost_ends_no_profile(failure):
    meter = Steady()

    def fails() -> float:
        raise failure

    meter.joules = fails
    found = profiled(Metering(meter=meter), budget=Budget(energy=1.0))
    ran = [trial for trial in found.trials if trial.error is None]
    assert {trial.stage for trial in ran} >= {"modes", ALONE}
    assert all(len(trial.block_s) >= 3 and trial.watts == () for trial in ran)
    assert found.meter.idle_w is None


@pytest.mark.parametrize("metering", ["measured", 5])
def test_what_is_no_metering_is_refused(metering):
    with raises(ValueGivenError, code="value.invalid", field="metering"):
        profiled(metering)


def test_energy_of_a_device_that_is_not_here_is_refused():
    model, optimizer, batch = loop()
    with raises(ValueGivenError, code="energy.no_meter", field="energy"):
        trimtab.plan(model, optimizer, mean_loss, batch, device="H100 SXM", objective=Objective(energy=1))
