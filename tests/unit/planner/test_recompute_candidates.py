"""Recomputing is chosen together with all else: where less memory is asked for, and where it costs least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import BLOCKS, CPU, Machine, candidate_of, measured, planned

from trimtab.core.choice import COMPILED_BLOCKS, COMPILED_GRAPHS, CUDA_GRAPHS, SplitCheck
from trimtab.core.objective import Budget, Objective
from trimtab.core.recompute_schedule import schedule_of
from trimtab.planner.plan_choice import choose
from trimtab.planner.recompute_candidates import schedules
from trimtab.planner.recompute_cost import keep_all

WHOLE = Machine().peak_bytes(measured(Machine()).reference_candidate)
REFUSED = SplitCheck(False, "rows see each other")


def machine(**how):
    """Return one whose blocks take 0.3 s of a step of 1 s forward, and whose micro-batches 0.4 s more each."""
    return Machine(**{"forward_s": 0.3, "split_s": 0.4} | how)


def limit(share):
    return Budget(memory=int(share * WHOLE))


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_limit_is_met_by_what_costs_least(share):
    made = machine()
    plan = planned(made, budget=limit(share))
    chosen = candidate_of(plan)
    assert plan.recompute.changed
    assert plan.recompute_blocks == BLOCKS
    assert chosen.micro_batch == 64
    assert made.peak_bytes(chosen) <= share * WHOLE
    assert schedule_of(plan.recompute.value, len(BLOCKS)) != keep_all(len(BLOCKS))


def test_a_tighter_limit_never_takes_less_time():
    plans = [planned(machine(), budget=limit(share)) for share in (0.95, 0.85, 0.75, 0.65, 0.55)]
    seconds = [plan.predicted.step_s for plan in plans]
    assert seconds == sorted(seconds)
    assert all(plan.recompute.changed for plan in plans)


def test_where_splitting_is_cheap_nothing_is_recomputed():
    plan = planned(machine(split_s=0.01), budget=limit(0.75))
    assert not plan.recompute.changed
    assert plan.micro_batch.value < 64
    assert plan.recompute.code in ("predicted.no_gain", "trial.no_gain")
    assert any(loser.value == "every_block" for loser in plan.recompute.rejected)


def test_the_plan_says_what_is_recomputed_and_what_would_fit_without():
    plan = planned(machine(), budget=limit(0.75))
    assert plan.recompute.code == "recompute.faster"
    assert "micro-batch 32 is predicted at 1." in plan.recompute.reason
    assert "not every_block: predicted at" in plan.explain()


def test_where_nothing_else_fits_it_is_what_does():
    made = machine()
    plan = choose(measured(made, budget=limit(0.7), check=REFUSED), Objective(), limit(0.7))
    assert plan.recompute.changed
    assert plan.micro_batch.value == 64
    assert plan.recompute.code == "recompute.needed"


def test_blocks_are_measured_where_nothing_else_is_left_to_try():
    """No final is due: nothing but the loop ran, and it does not fit."""
    made, device = machine(), replace(CPU, peak_flops={"fp32": 1e11})
    how = {"check": REFUSED, "can_retain": False, "has_convolutions": False, "supports_fused": False}
    profile = measured(made, budget=limit(0.7), device=device, **how)
    plan = choose(profile, Objective(), limit(0.7))
    assert plan.recompute.changed
    assert plan.measured.peak_bytes <= 0.7 * WHOLE


@pytest.mark.parametrize(
    ("budget", "objective", "is_asked"),
    [
        (Budget(), Objective(), False),
        (limit(2.0), Objective(), False),
        (limit(0.5), Objective(), True),
        (Budget(), Objective(memory=1.0), True),
    ],
)
def test_blocks_are_measured_where_memory_is_asked_for_alone(budget, objective, is_asked):
    made = machine()
    measured(made, budget=budget, objective=objective)
    assert bool(made.measured_blocks) is is_asked


def test_the_lightest_is_measured_too_where_nothing_fits():
    """The fastest does not fit whatever it computes again; a slower precision does."""
    made = machine(speed={"bf16": 0.95}, weight={"bf16": 0.6})
    facts = {"check": REFUSED, "can_retain": False, "has_convolutions": False}
    plan = choose(measured(made, budget=limit(0.4), **facts), Objective(), limit(0.4))
    assert [each.precision for each in made.measured_blocks] == ["fp32", "bf16"]
    assert (plan.precision.value, plan.recompute.changed) == ("bf16", True)


@pytest.mark.parametrize(("check", "is_asked"), [(SplitCheck(True, "same"), False), (REFUSED, True)])
def test_a_hurried_search_measures_blocks_only_where_nothing_else_fits(check, is_asked):
    made = machine()
    measured(made, budget=limit(0.75), over_time_budget=True, check=check)
    assert bool(made.measured_blocks) is is_asked


def test_a_recorded_profile_is_planned_under_limits_it_was_not_made_for():
    made = machine()
    profile = measured(made, always=True)
    for share in (0.9, 0.7, 0.55):
        plan = choose(profile, Objective(), limit(share))
        assert plan.recompute.changed
        assert made.peak_bytes(candidate_of(plan)) <= share * WHOLE
    assert not choose(profile, Objective(), Budget()).recompute.changed


def test_a_verified_schedule_stays_under_a_looser_limit_where_nothing_is_better():
    profile = measured(machine(), budget=limit(0.7))
    chosen, again = (choose(profile, Objective(), limit(share)) for share in (0.7, 0.705))
    assert again.recompute.value == chosen.recompute.value
    assert again.verified == chosen.verified


def test_a_limit_that_binds_nothing_leaves_what_memory_weighs():
    objective = Objective(time=0.2, memory=0.8)
    profile = measured(machine(), objective=objective, always=True)
    free, loose = (choose(profile, objective, budget) for budget in (Budget(), Budget(memory=2**60)))
    assert free.recompute.changed
    assert loose.recompute.value == free.recompute.value


def test_schedules_that_win_where_memory_weighs_are_looked_at_where_it_does_not():
    """Else the weights between which a choice stands would hold some at which it does not."""
    profile = measured(machine(), always=True, can_retain=False)
    timed, weighed = (choose(profile, Objective(time=1, memory=weight), Budget()) for weight in (0.0, 1e-6))
    assert not timed.recompute.changed
    assert timed.stands_between == weighed.stands_between
    assert timed.front == weighed.front
    _, high = timed.stands_between
    assert 0 < high < 1
    told = {point.settings for point in timed.front if "activation checkpointing" in point.settings}
    assert any(schedule in text for text in told for schedule in profile.recomputables[0].schedules)


def test_compiled_models_are_recomputed_unless_captured_or_with_buffers():
    profile = measured(machine(), always=True)
    candidate = profile.reference_candidate
    eager = schedules(profile, candidate, Budget(), 0.02)
    for way, expected in ((True, eager), (COMPILED_BLOCKS, eager), (CUDA_GRAPHS, ()), (COMPILED_GRAPHS, ())):
        assert schedules(profile, replace(candidate, compiled=way), Budget(), 0.02) == expected
    buffered = replace(profile, recomputables=tuple(replace(r, has_buffers=True) for r in profile.recomputables))
    assert schedules(buffered, candidate, Budget(), 0.02) == eager
    assert schedules(buffered, replace(candidate, compiled=True), Budget(), 0.02) == ()


def test_compilation_and_recomputation_are_chosen_together_under_a_limit():
    """Compilation alone misses the limit in one micro-batch, and further micro-batches cost more."""
    made = machine(compiled_speed=1.5, split_s=1.0)
    plan = planned(made, budget=limit(0.7), total_steps=100_000)
    assert plan.compiled.value is True
    assert plan.recompute.value is not None
    assert plan.measured.peak_bytes <= 0.7 * WHOLE
    told, found = plan.predicted.step_s, made.step_s("final", candidate_of(plan))
    assert told == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("told", [0.8, 0.9, 1.1])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_chain_that_tells_too_little_breaks_no_limit(told, share):
    """The final counts it, the model learns, and there is another."""
    made = machine(chain_told=told)
    plan = planned(made, budget=limit(share))
    assert made.peak_bytes(candidate_of(plan)) <= share * WHOLE
    assert plan.measured.peak_bytes <= share * WHOLE


def test_what_fails_when_it_recomputes_leaves_what_does_not():
    """The best that keeps all is in the same final."""
    made = machine(fails=lambda stage, candidate: "torn" if candidate.recompute else None)
    plan = planned(made, budget=limit(0.75))
    assert not plan.recompute.changed
    assert plan.micro_batch.value == 32
    assert plan.measured.peak_bytes <= 0.75 * WHOLE


def test_the_optimizers_step_is_a_floor():
    """Its state and gradients are there whatever is recomputed."""
    made = machine()
    profile = measured(made, always=True)
    high = replace(profile.traces[0].whole, lines=((0.9 * WHOLE, 0.0),))
    profile = replace(profile, traces=tuple(replace(traced, step=high) for traced in profile.traces))
    plan = choose(profile, Objective(), limit(0.95))
    assert plan.predicted.peak_bytes >= 0.9 * WHOLE
