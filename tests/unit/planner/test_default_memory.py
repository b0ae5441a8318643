"""Memory is never spent unasked: a loop that accumulates keeps to its own peak, others clearly close to theirs."""

from __future__ import annotations

import pytest
from simulated_machine import MIB, Machine, measured

from trimtab.core.choice import SplitCheck
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.plan_choice import choose
from trimtab.planner.trial_statistics import CLEARLY_MORE
from trimtab.plans.profile import OWN_PEAK

ACCUMULATES = Reference(accumulate=4)
REFUSED = SplitCheck(False, "a layer computes over the batch")
OWN = 100 * MIB + 10 * MIB * 16  # of micro-batches of 16 of 64 rows
WHOLE = 100 * MIB + 10 * MIB * 64


def decided(machine, budget=None, **options):
    budget = budget or Budget()
    profile = measured(machine, budget=budget, can_retain=False, supports_fused=False, **options)
    return profile, choose(profile, Objective(), budget)


def codes(plan):
    return [note.code for note in plan.notes]


def test_a_loop_that_accumulates_is_measured_as_it_is():
    profile, plan = decided(Machine(), reference=ACCUMULATES)
    assert profile.reference_candidate.micro_batch == 16
    assert plan.baseline.peak_bytes == OWN
    assert profile.own_peak_bytes == OWN
    assert profile.limits(Budget()).memory_bytes == pytest.approx(OWN_PEAK * OWN, abs=1)
    assert profile.limits(Budget(memory="1GiB")) == Budget(memory="1GiB")


def test_fewer_and_larger_micro_batches_are_faster_and_not_taken():
    _, plan = decided(Machine(split_s=0.3), reference=ACCUMULATES)
    assert plan.micro_batch.value == 16
    assert not plan.micro_batch.changed
    assert plan.measured.peak_bytes <= OWN_PEAK * OWN
    assert codes(plan) == ["memory.own_peak"]


@pytest.mark.parametrize(("memory", "rows"), [("1GiB", 64), (100 * MIB + 10 * MIB * 33, 32)])
def test_a_limit_of_the_users_allows_more(memory, rows):
    _, plan = decided(Machine(split_s=0.3), Budget(memory=memory), reference=ACCUMULATES)
    assert plan.micro_batch.value == rows
    assert plan.verified[0] > 1
    assert codes(plan) == ["memory.peak_rises"]


def test_memory_that_a_precision_frees_may_be_used_for_larger_micro_batches():
    _, plan = decided(Machine(split_s=0.3, weight={"bf16": 0.4}), reference=ACCUMULATES)
    assert plan.micro_batch.value > 16
    assert plan.precision.value == "bf16"
    assert plan.measured.peak_bytes <= OWN_PEAK * OWN


def test_where_splitting_changes_the_gradient_the_micro_batch_stays_the_loops_own():
    _, plan = decided(Machine(split_s=0.3), Budget(memory="1TiB"), reference=ACCUMULATES, check=REFUSED)
    assert (plan.micro_batch.value, plan.micro_batch.changed, plan.plan_kind) == (16, False, "equivalent")


def test_a_batch_that_does_not_divide_evenly_is_accumulated_in_parts_that_are_no_larger():
    profile, plan = decided(Machine(split_s=0.3), reference=Reference(accumulate=6))
    assert profile.reference_candidate.micro_batch == plan.micro_batch.value == 11


@pytest.mark.parametrize(("weight", "changes"), [(1.05, ("precision",)), (1.2, ())])
def test_without_accumulation_a_faster_setting_is_not_taken_at_clearly_more_memory(weight, changes):
    _, plan = decided(Machine(speed={"bf16": 1.5}, weight={"bf16": weight}), check=REFUSED)
    assert plan.changes == changes
    assert (plan.measured.peak_bytes > 1.02 * plan.baseline.peak_bytes) is bool(changes)
    assert codes(plan) == ["memory.peak_rises"] * bool(changes)
    assert plan.measured.peak_bytes <= CLEARLY_MORE * plan.baseline.peak_bytes


def test_it_is_taken_in_smaller_micro_batches_that_need_no_more():
    _, plan = decided(Machine(speed={"bf16": 1.5}, weight={"bf16": 1.2}))
    assert plan.changes == ("micro_batch", "precision")
    assert plan.measured.peak_bytes < plan.baseline.peak_bytes


def test_but_where_a_limit_allows_it():
    machine = Machine(speed={"bf16": 1.5}, weight={"bf16": 1.2})
    _, plan = decided(machine, Budget(memory="1GiB"))
    assert plan.changes == ("precision",)
    _, without = decided(machine, check=REFUSED)
    assert any("1.2" in each.reason for each in without.precision.rejected if each.value == "bf16")
