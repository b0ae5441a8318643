"""Energy in a plan: it moves the choice where it is weighed or limited, and is nowhere where nothing counted it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from raising import raises
from simulated_machine import MIB, Machine, candidate_of, measured, planned

from trimtab.core.energy_reading import MeterFacts, PowerLimit, Provenance
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.planner import search_space
from trimtab.planner.cost_model import CostModel
from trimtab.planner.plan_choice import choose
from trimtab.planner.selection import decide
from trimtab.planner.statistics import ratio_interval
from trimtab.planner.trial_statistics import control_interval, score_ratio
from trimtab.plans.profile import Trial

LIMIT = PowerLimit("gpu 0", 700.0, 200.0, 700.0)
METER = MeterFacts(Provenance.MEASURED, ("nvml gpu 0",), 60.0, limits=(LIMIT,))
BY_TIME, BY_BOTH, BY_ENERGY = Objective(), Objective(time=1, energy=1), Objective(time=0.05, energy=1)


def hungry(candidate) -> float:
    """Return watts: bf16 is a fifth faster here, and draws twice as much."""
    return 200.0 if candidate.precision == "bf16" else 100.0


def machine(**given) -> Machine:
    return Machine(speed={"bf16": 1.3}, watts=hungry, noise=0.002, **given)


@pytest.mark.parametrize(("objective", "precision"), [(BY_TIME, "bf16"), (BY_ENERGY, "fp32"), (BY_BOTH, "fp32")])
def test_joules_move_the_choice(objective, precision):
    assert planned(machine(), objective=objective, can_retain=False).precision.value == precision


def test_what_saves_joules_wins_though_it_is_no_faster():
    thrifty = Machine(watts=lambda c: 60.0 if c.precision == "bf16" else 100.0, noise=0.002)
    objective = {"objective": BY_ENERGY, "can_retain": False}
    plan = planned(thrifty, **objective)
    assert plan.precision.value == "bf16"
    assert plan.measured.energy_j == pytest.approx(0.6 * plan.baseline.energy_j, rel=0.02)
    assert "x the energy" in plan.precision.reason
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
    page = plan.explain()
    assert "energy" not in page
    assert not re.search(r"\d [mk]?J\b", page)
    metered = choose(measured(machine(), can_retain=False), Objective(), Budget()).explain()
    assert "energy" in metered
    assert re.search(r"\d [mk]?J\b", metered)


def test_a_weight_on_what_nothing_counted_is_refused():
    profile = measured(Machine(), can_retain=False)
    with raises(ValueGivenError, code="energy.not_measured", field="energy"):
        choose(profile, BY_BOTH, Budget())


def test_the_page_says_what_counted_or_why_nothing_did():
    profile = measured(machine(), objective=BY_BOTH, can_retain=False)
    page = choose(replace(profile, meter=METER), BY_BOTH, Budget()).explain()
    assert "energy: measured (nvml gpu 0); includes 60 W of idle power" in page
    assert ", energy 100 J" in page
    nothing = MeterFacts(Provenance.ABSENT, reason="there is none", left_out=0.5)
    page = choose(replace(profile, meter=nothing), BY_TIME, Budget()).explain()
    assert "energy: not measured: there is none. Its weight of 0.5 in the objective was set to 0" in page


def test_a_limit_on_joules_is_kept():
    plan = planned(machine(), budget=Budget(energy=110.0), can_retain=False)
    assert plan.precision.value == "fp32"
    assert any("J per step is over the budget of 110 J" in loser.reason for loser in plan.precision.rejected)
    assert any(loser.code == "budget.energy" for loser in plan.precision.rejected)
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        planned(machine(), budget=Budget(energy=5.0), can_retain=False)


def test_a_limit_on_joules_is_met_by_nobody_whose_joules_are_not_known():
    with pytest.raises(InfeasibleError):
        planned(Machine(), budget=Budget(energy=1e6), can_retain=False)
    found = search_space.priced_candidates(measured(Machine(), can_retain=False), Budget(energy=1e6))
    assert {point.refusal.code for point in found} == {"energy.unknown"}


def final_of(objective: Objective, *, own_w, half_w, control_w=100.0, budget=None, half_s=0.1, own_mib=1, half_mib=1):
    """Return a profile of a final: the loop, bf16, and the loop again; watts are None where the meter was lost."""
    profile = measured(machine(), objective=objective, budget=budget, can_retain=False)
    own = profile.reference_candidate

    def trial(candidate, step_s, watts, mib, **more) -> Trial:
        return Trial("final", candidate, (step_s,) * 5, mib * MIB, watts=() if watts is None else (watts,) * 5, **more)

    half = trial(replace(own, precision="bf16"), half_s, half_w, half_mib)
    quarter = trial(replace(own, precision="bf16", micro_batch=16), 1.01 * half_s, half_w, half_mib)
    trials = (trial(own, 1.0, own_w, own_mib), half, quarter, trial(own, 1.0, control_w, 1, control=True))
    before = tuple(each for each in profile.trials if not each.stage.startswith("final"))
    return replace(profile, trials=(*before, *trials))


def precision_of_final(profile, budget: Budget = Budget()) -> str:  # noqa: B008
    return decide(profile, "final", profile.objective, budget).winner.candidate.precision


def test_a_final_is_not_won_by_who_has_no_joules():
    assert precision_of_final(final_of(BY_ENERGY, own_w=100.0, half_w=50.0)) == "bf16"
    assert precision_of_final(final_of(BY_ENERGY, own_w=100.0, half_w=None)) == "fp32"


def test_what_a_final_that_asked_for_no_joules_did_not_prove_was_not_lost_there():
    fast = Machine(speed={"bf16": 2.0}, watts=lambda candidate: 100.0, noise=0.002)
    profile = measured(fast, can_retain=False)
    one = replace(profile, trials=tuple(replace(trial, watts=trial.watts[:1]) for trial in profile.trials))
    plan = choose(one, BY_ENERGY, Budget())
    assert plan.precision.value == "bf16"
    assert plan.measured is not None  # what is chosen has been run
    assert plan.measured.energy_j < 0.6 * plan.baseline.energy_j


def test_who_lost_a_final_by_its_seconds_lost_it_whatever_its_joules_are():
    """It was faster where candidates are put in order, and slower in each block beside the loop."""

    def step_of(stage: str, candidate) -> float:
        if candidate.precision != "bf16":
            return 1.0
        return 1.1 if stage.startswith("final") else 0.85

    profile = measured(Machine(step_of=step_of, watts=lambda candidate: 100.0, noise=0.002), can_retain=False)
    lost = {trial.candidate for trial in profile.stage("final")} - {profile.reference_candidate}
    assert any(candidate.precision == "bf16" for candidate in lost)
    one = replace(profile, trials=tuple(replace(trial, watts=trial.watts[:1]) for trial in profile.trials))
    assert candidate_of(choose(one, Objective(time=1, energy=0.05), Budget())) not in lost


@pytest.mark.parametrize(
    ("fused_w", "control_w", "is_fused"), [(115.0, 100.0, False), (100.0, 100.0, True), (100.0, None, False)]
)
def test_a_fused_step_is_asked_for_its_joules_where_they_are_weighed(fused_w, control_w, is_fused):
    profile = final_of(BY_ENERGY, own_w=100.0, half_w=100.0, control_w=control_w)
    own, half, _, control = profile.stage("final")
    fused = replace(
        half, candidate=replace(own.candidate, fused_optimizer=True), block_s=(0.99,) * 5, watts=(fused_w,) * 5
    )
    before = tuple(each for each in profile.trials if not each.stage.startswith("final"))
    found = decide(replace(profile, trials=(*before, own, fused, control)), "final", BY_ENERGY, Budget())
    assert found.winner.candidate.fused_optimizer is is_fused


def test_a_limit_on_joules_whose_meter_was_lost_is_told_as_such():
    profile = measured(Machine(), can_retain=False)
    for meter, why in ((METER, "the meter failed in every trial"), (profile.meter, profile.meter.reason)):
        with raises(InfeasibleError, code="energy.not_measured", field="budget") as caught:
            choose(replace(profile, meter=meter), Objective(), Budget(energy=1e6))
        assert why in caught.value.problem


@pytest.mark.parametrize("objective", [BY_ENERGY, BY_BOTH])
def test_the_loop_stays_where_its_own_meter_was_lost(objective):
    profile = final_of(objective, own_w=None, half_w=50.0)
    assert precision_of_final(profile) == "fp32"
    plan = choose(profile, objective, Budget())
    assert plan.precision.value == "fp32"
    assert plan.precision.code == "energy.not_read"
    assert plan.baseline.energy_j is None


def test_without_the_controls_joules_nothing_is_resolved():
    profile = final_of(BY_ENERGY, own_w=100.0, half_w=50.0, control_w=None)
    assert control_interval(profile, "final", BY_ENERGY) is None
    assert control_interval(profile, "final") is not None
    assert precision_of_final(profile) == "fp32"


def test_a_lost_meter_of_the_loop_is_no_reason_to_stay_where_it_breaks_a_limit():
    budget = Budget(memory=4 * MIB)
    profile = final_of(BY_ENERGY, own_w=None, half_w=50.0, own_mib=5, budget=budget)
    outcome = decide(profile, "final", BY_ENERGY, budget)
    assert outcome.winner.candidate.precision == "bf16"
    assert outcome.must_leave.code == "budget.memory"


@pytest.mark.parametrize(("limit_j", "precision"), [(110.0, "fp32"), (90.0, "bf16")])
def test_a_limit_is_held_against_the_loops_watts_of_another_trial_where_its_meter_was_lost(limit_j, precision):
    budget = Budget(energy=limit_j)
    profile = final_of(BY_TIME, own_w=None, half_w=50.0, half_s=1.2, budget=budget)
    assert precision_of_final(profile, budget) == precision


def test_where_energy_is_weighed_there_are_as_many_pairs_as_windows():
    whole = measured(Machine(), can_retain=False).reference_candidate
    uneven = (80.0, 125.0, 90.0, 110.0, 100.0)
    own = Trial("final", whole, (1.0,) * 15, MIB, watts=(100.0,) * 5)
    rival = Trial("final", whole, (1.0,) * 15, MIB, watts=uneven)
    found = score_ratio(rival, own, Objective(0, 0, 1), own)
    assert found.n == 5
    assert found == ratio_interval([100.0 / watts for watts in uneven])
    assert score_ratio(rival, own, Objective(1, 1, 0), own).n == 15


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
    found = search_space.priced_candidates(profile, Budget())
    flat, whole = search_space.front(found), search_space.front(found, with_energy=True)
    assert set(flat) <= set(whole)
    assert min(found, key=lambda p: p.cost.energy_j) in whole
    for point in whole:
        for other in (each for each in found if each.cost.peak_bytes is not None):
            ours, theirs = ((p.cost.step_s, p.cost.peak_bytes, p.cost.energy_j) for p in (point, other))
            assert ours == theirs or not all(b <= a for a, b in zip(ours, theirs, strict=True))
    plan = choose(profile, BY_BOTH, Budget())
    assert {point.energy_j for point in plan.front} == {point.cost.energy_j for point in whole}
    assert plan.stands_between is None  # of the weights of memory and time alone


def test_what_is_not_known_is_on_no_front_that_it_counts_for():
    found = search_space.priced_candidates(measured(machine(), objective=BY_BOTH, can_retain=False), Budget())
    known = [point for point in found if point.refusal is None][:3]
    cost = replace(known[0].cost, energy_j=None, peak_bytes=1, step_s=1e-9)  # unbeaten, were it known
    unknown = replace(known[0], cost=cost)
    assert search_space.front([*known, unknown], with_energy=True) == search_space.front(known, with_energy=True)
    assert search_space.front([*known, unknown]) == (unknown,)


def test_where_energy_is_weighed_a_faster_setting_that_lost_says_at_which_energy():
    plan = choose(final_of(BY_ENERGY, own_w=100.0, half_w=2000.0), BY_ENERGY, Budget())
    assert plan.precision.value == "fp32"
    assert plan.precision.code == "trial.no_gain"
    (said,) = [loser.reason for loser in plan.precision.rejected if loser.value == "bf16"]
    assert "10x the speed" in said
    assert "2x the energy" in said


def test_a_power_limit_is_advice_where_energy_counts_and_it_may_be_set():
    profile = replace(measured(machine(), objective=BY_BOTH, can_retain=False), meter=METER)
    (said,) = [each for each in choose(profile, BY_BOTH, Budget()).advice if each.code == "power.limit"]
    assert all(figure in said.text for figure in ("gpu 0", "700 W", "200 W"))
    at_lowest = replace(METER, limits=(dataclasses.replace(LIMIT, watts=200.0),))
    for other in (
        replace(profile, meter=at_lowest),
        replace(profile, objective=Objective()),
        replace(profile, meter=replace(METER, limits=())),
    ):
        assert not any(each.code == "power.limit" for each in choose(other, other.objective, Budget()).advice)


def test_a_candidate_is_only_tried_against_the_loop_where_its_joules_promise_something():
    by_energy = machine()
    measured(by_energy, objective=BY_ENERGY, can_retain=False)
    finals = [stage for stage in by_energy.stages if stage.name.startswith("final")]
    assert all(candidate.precision == "fp32" for stage in finals for candidate in stage.candidates)
    assert candidate_of(planned(machine(), objective=BY_ENERGY, can_retain=False)).precision == "fp32"
