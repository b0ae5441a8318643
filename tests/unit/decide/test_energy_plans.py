"""Energy in a plan: it moves the choice where it is weighed or limited, and is nowhere where nothing counted it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from simulated_machine import MIB, Machine, candidate_of, measured, planned

from trimtab.core.energy import MeterFacts, PowerLimit, Provenance
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.profile import Trial
from trimtab.decide import space
from trimtab.decide.cost_model import CostModel
from trimtab.decide.finals import decide
from trimtab.decide.planner import choose
from trimtab.decide.readings import control_interval, score_ratio

LIMIT = PowerLimit("gpu 0", 700.0, 200.0, 700.0)
METER = MeterFacts(Provenance.MEASURED, ("nvml gpu 0",), 60.0, limits=(LIMIT,))
BY_TIME, BY_BOTH, BY_ENERGY = Objective(), Objective(time=1, energy=1), Objective(time=0.05, energy=1)


def hungry(candidate) -> float:
    """Return watts: bf16 is a fifth faster here, and draws twice as much."""
    return 200.0 if candidate.precision == "bf16" else 100.0


def machine(**given) -> Machine:
    return Machine(speed={"bf16": 1.3}, watts=hungry, noise=0.002, **given)


@pytest.mark.parametrize(
    ("objective", "precision"),
    [(BY_TIME, "bf16"), (BY_ENERGY, "fp32"), (BY_BOTH, "fp32")],
)
def test_joules_move_the_choice(objective, precision):
    assert planned(machine(), objective=objective, can_retain=False).precision.value == precision


def test_what_saves_joules_wins_though_it_is_no_faster():
    thrifty = Machine(watts=lambda c: 60.0 if c.precision == "bf16" else 100.0, noise=0.002)
    objective = {"objective": BY_ENERGY, "can_retain": False}
    plan = planned(thrifty, **objective)
    assert plan.precision.value == "bf16"
    assert plan.measured.energy_j == pytest.approx(0.6 * plan.baseline.energy_j, rel=0.02)
    assert "x its energy" in plan.precision.reason
    assert planned(replace(thrifty, stages=[]), can_retain=False).precision.value == "fp32"


def test_predicted_joules_are_watts_of_what_is_nearest_times_seconds():
    profile = measured(machine(), objective=BY_BOTH, can_retain=False)
    model = CostModel(profile)
    reference = profile.reference_candidate
    for candidate in (reference, replace(reference, precision="bf16"), replace(reference, micro_batch=16)):
        found = model.predict(candidate)
        assert found.energy_j == pytest.approx(hungry(candidate) * found.step_s)


def test_without_a_meter_no_joule_is_anywhere():
    profile = measured(Machine(speed={"bf16": 1.3}), can_retain=False)
    plan = choose(profile, Objective(), Budget())
    assert all(trial.energy_j is None for trial in profile.trials)
    assert [cost.energy_j for cost in (plan.baseline, plan.predicted, plan.measured)] == [None] * 3
    assert all(point.energy_j is None for point in plan.front)
    assert not re.search(r"\d m?J\b", str(plan))
    metered = choose(measured(machine(), objective=BY_BOTH, can_retain=False), BY_BOTH, Budget())
    assert re.search(r"\d m?J\b", str(metered))


def test_a_weight_on_what_nothing_counted_is_refused():
    profile = measured(Machine(), can_retain=False)
    with pytest.raises(ValueGivenError, match="no joules"):
        choose(profile, BY_BOTH, Budget())


def test_the_page_says_what_counted_or_why_nothing_did():
    profile = measured(machine(), objective=BY_BOTH, can_retain=False)
    page = str(choose(replace(profile, meter=METER), BY_BOTH, Budget()))
    assert "energy: measured by nvml gpu 0; idle 60 W, which is in every figure" in page
    assert ", energy 100 J" in page
    nothing = MeterFacts(Provenance.ABSENT, reason="there is none", left_out=0.5)
    page = str(choose(replace(profile, meter=nothing), BY_TIME, Budget()))
    assert "energy: not measured: there is none; its weight of 0.5 is left out" in page


def test_a_limit_on_joules_is_kept():
    plan = planned(machine(), budget=Budget(energy=110.0), can_retain=False)
    assert plan.precision.value == "fp32"
    assert any("J per step is over the budget of 110 J" in loser.reason for loser in plan.precision.losers)
    with pytest.raises(InfeasibleError, match="over the budget of 5 J"):
        planned(machine(), budget=Budget(energy=5.0), can_retain=False)


def test_a_limit_on_joules_is_met_by_nobody_whose_joules_are_not_known():
    with pytest.raises(InfeasibleError):
        planned(Machine(), budget=Budget(energy=1e6), can_retain=False)
    found = space.points(measured(Machine(), can_retain=False), Budget(energy=1e6))
    assert {point.refusal for point in found} == {"its energy is not known"}


def test_a_final_in_which_a_meter_was_lost_is_not_won_by_who_has_no_joules():
    profile = measured(machine(), objective=BY_ENERGY, can_retain=False)
    half = replace(profile.reference_candidate, precision="bf16")
    whole = profile.reference_candidate
    trials = (
        Trial("final", whole, (1.0,) * 5, MIB, watts=(100.0,) * 5),
        Trial("final", half, (0.1,) * 5, MIB),
        Trial("final", whole, (1.0,) * 5, MIB, control=True, watts=(100.0,) * 5),
    )
    outcome = decide(replace(profile, trials=trials), "final", BY_ENERGY, Budget())
    assert outcome.winner.candidate == whole


def test_the_control_of_a_final_holds_the_noise_of_watts_too():
    whole = measured(Machine(), can_retain=False).reference_candidate
    even, uneven = (100.0,) * 5, (80.0, 125.0, 90.0, 110.0, 100.0)
    first = Trial("final", whole, (1.0,) * 5, MIB, watts=even)
    control = Trial("final", whole, (1.0,) * 5, None, control=True, watts=uneven)
    profile = replace(measured(Machine(), can_retain=False), trials=(first, control))
    speed, cost = control_interval(profile, "final"), control_interval(profile, "final", BY_ENERGY)
    assert (speed.low, speed.high) == (1.0, 1.0)
    assert cost.high - cost.low > 0.2
    assert score_ratio(first, first, BY_ENERGY, first).mean == pytest.approx(1.0)


def test_the_front_has_who_takes_least_energy_where_that_counts():
    profile = measured(machine(), objective=BY_BOTH, can_retain=False)
    found = space.points(profile, Budget())
    flat, whole = space.front(found), space.front(found, with_energy=True)
    assert set(flat) <= set(whole)
    assert min(found, key=lambda p: p.cost.energy_j) in whole
    for point in whole:
        for other in (each for each in found if each.cost.peak_bytes is not None):
            ours, theirs = ((p.cost.step_s, p.cost.peak_bytes, p.cost.energy_j) for p in (point, other))
            assert ours == theirs or not all(b <= a for a, b in zip(ours, theirs, strict=True))
    plan = choose(profile, BY_BOTH, Budget())
    assert {point.energy_j for point in plan.front} == {point.cost.energy_j for point in whole}
    assert plan.stands_between is None  # of the weights of memory and time alone


def test_a_power_limit_is_advice_where_energy_counts_and_it_may_be_set():
    profile = replace(measured(machine(), objective=BY_BOTH, can_retain=False), meter=METER)
    said = [text for text in choose(profile, BY_BOTH, Budget()).advice if "gpu 0" in text]
    assert len(said) == 1
    assert "may draw 700 W" in said[0]
    assert "down to 200 W" in said[0]
    at_lowest = replace(METER, limits=(dataclasses.replace(LIMIT, watts=200.0),))
    for other in (
        replace(profile, meter=at_lowest),
        replace(profile, objective=Objective()),
        replace(profile, meter=replace(METER, limits=())),
    ):
        assert not any("gpu 0" in text for text in choose(other, other.objective, Budget()).advice)


def test_a_candidate_is_only_tried_against_the_loop_where_its_joules_promise_something():
    by_energy = machine()
    measured(by_energy, objective=BY_ENERGY, can_retain=False)
    finals = [stage for stage in by_energy.stages if stage.name.startswith("final")]
    assert all(candidate.precision == "fp32" for stage in finals for candidate in stage.candidates)
    assert candidate_of(planned(machine(), objective=BY_ENERGY, can_retain=False)).precision == "fp32"


def test_a_reference_whose_joules_were_lost_stays():
    """Nobody can be told from it by energy, and that speaks for nobody."""
    thrifty = Machine(watts=lambda c: 60.0 if c.precision == "bf16" else 100.0, noise=0.002, speed={"bf16": 1.5})
    found = measured(thrifty, objective=BY_ENERGY, can_retain=False)
    assert choose(found, BY_ENERGY, Budget()).precision.value == "bf16"
    reference = found.reference_candidate
    lost = [replace(t, watts=()) if t.candidate == reference else t for t in found.trials]
    plan = choose(replace(found, trials=tuple(lost)), BY_ENERGY, Budget())
    assert plan.precision.value == "fp32"


def test_what_is_not_known_is_on_no_front_that_it_counts_for():
    found = space.points(measured(machine(), objective=BY_BOTH, can_retain=False), Budget())
    known = [point for point in found if point.refusal is None][:3]
    cost = replace(known[0].cost, energy_j=None, peak_bytes=1, step_s=1e-9)  # unbeaten, were it known
    unknown = replace(known[0], cost=cost)
    assert unknown not in space.front([*known, unknown], with_energy=True)
    assert space.front(known, with_energy=True)
    assert unknown in space.front([*known, unknown])
