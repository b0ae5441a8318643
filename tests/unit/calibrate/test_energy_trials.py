"""Joules of trials: windows of a second beside the blocks, of every arm alike, and a loop that is left as it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import trimtab
from trimtab import Metering
from trimtab.calibrate import power, trials
from trimtab.core.energy import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.profile import ALONE
from trimtab.decide.planner import choose
from trimtab.measure import energy, machine, meters
from trimtab.measure.energy import MeterLost

ROWS = 8
NOTHING = "there is no .*powercap"


class Steady:
    """A meter of a machine that always draws the same."""

    provenance, sources, period_s = Provenance.MEASURED, ("a steady one",), math.inf

    def __init__(self, watts: float = 40.0) -> None:
        self.watts, self.clock, self.lost = watts, energy.time.perf_counter, False

    def joules(self) -> float:
        if self.lost:
            raise MeterLost("it is gone")
        return self.watts * self.clock()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Windows of ten milliseconds, as the meter here is exact."""
    monkeypatch.setattr(trials, "BLOCK_S", 1e-6)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})
    for module in (power, meters):
        monkeypatch.setattr(module, "WINDOW_S", 0.01)
    laps = energy.EnergyClock.__init__

    def brief(self, meter, **given):
        laps(self, meter, window_s=0.01, **given)

    monkeypatch.setattr(energy.EnergyClock, "__init__", brief)


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,)))


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


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
    assert whole
    assert all(trial.power_w == pytest.approx(40.0, rel=0.2) for trial in whole)
    finals = [trial for trial in whole if trial.stage.startswith("final")]
    assert {len(trial.watts) for trial in finals} == {5}
    assert {len(trial.watts) for trial in whole if trial not in finals} == {1}
    assert [trial.watts for trial in found.trials if trial.stage == ALONE and trial.watts] == []
    assert (found.meter.provenance, found.meter.sources) == (Provenance.MEASURED, ("a steady one",))
    assert found.meter.idle_w == pytest.approx(40.0, rel=0.2)
    assert choose(found, found.objective, found.budget).baseline.energy_j is not None


def test_where_energy_does_not_count_only_finals_are_metered():
    found = profiled(Metering(meter=Steady()))
    ran = [trial for trial in found.trials if trial.block_s]
    metered = {trial.stage.startswith("final") for trial in ran if trial.watts}
    assert metered == {True}
    assert False in {trial.stage.startswith("final") for trial in ran}
    assert {len(trial.watts) for trial in ran if trial.stage.startswith("final")} == {1}
    assert found.meter.idle_w is None  # no second is spent on what does not count


def test_watts_that_were_given_take_no_window_and_are_said_to_be_estimates(monkeypatch):
    monkeypatch.setattr(power, "EnergyClock", None)
    found = profiled(Metering(watts=90), objective=Objective(energy=1))
    assert {watts for trial in found.trials for watts in trial.watts} == {90.0}
    assert (found.meter.provenance, found.meter.idle_w) == (Provenance.ESTIMATED, None)
    page = str(choose(found, found.objective, found.budget))
    assert "energy: estimated by 90 W, as given" in page


def test_without_a_meter_a_weight_is_refused_or_left_out_as_was_accepted(tmp_path):
    root = tmp_path / "powercap"
    with pytest.raises(ValueGivenError, match=NOTHING):
        profiled(Metering(root=root), objective=Objective(energy=1))
    found = profiled(Metering(root=root, without="renormalise"), objective=Objective(time=1, energy=1))
    assert found.objective == Objective()
    assert found.meter.left_out == 0.5
    assert all(trial.watts == () for trial in found.trials)
    assert "its weight of 0.5 is left out" in str(choose(found, found.objective, found.budget))
    with pytest.raises(ValueGivenError, match=NOTHING):
        profiled(Metering(root=root, without="renormalise"), budget=Budget(energy=1.0))


def test_without_a_meter_and_a_wish_nothing_is_said_but_why(tmp_path):
    found = profiled(Metering(root=tmp_path / "powercap"))
    assert found.meter.is_absent
    assert all(trial.energy_j is None for trial in found.trials)


def test_a_meter_that_is_lost_leaves_trials_without_joules():
    meter = Steady()
    steady = meter.joules
    reads = iter(range(10**9))

    def failing():
        if next(reads) > 40:
            raise MeterLost("it is gone")
        return steady()

    meter.joules = failing
    found = profiled(Metering(meter=meter), objective=Objective(energy=1))
    ran = [trial for trial in found.trials if trial.error is None]
    assert all(trial.block_s for trial in ran)
    assert any(trial.watts for trial in ran)
    assert any(not trial.watts for trial in ran)
    assert all(math.isfinite(watts) for trial in ran for watts in trial.watts)


@pytest.mark.parametrize("metering", ["measured", 5])
def test_what_is_no_metering_is_refused(metering):
    with pytest.raises(ValueGivenError, match="metering"):
        profiled(metering)


def test_energy_of_a_device_that_is_not_here_is_refused():
    model, optimizer, batch = loop()
    with pytest.raises(ValueGivenError, match="H100 SXM is not here"):
        trimtab.plan_elsewhere(model, optimizer, mean_loss, batch, "H100 SXM", objective=Objective(energy=1))
