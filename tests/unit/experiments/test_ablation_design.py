"""Which arms tell what a change is worth, and the plan of each."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import Choice, Effect, MeasuredCost
from trimtab.core.objective import Reference
from trimtab.experiments.ablation.ablation_design import (
    PLAN,
    UNCHANGED,
    AblationDesign,
    changes_of,
    plans_of,
    power_of_all,
    with_only,
)
from trimtab.plans.plan import Plan

PLAIN = Reference("fp32")
VALUES = {
    "micro_batch": 8,
    "precision": "bf16",
    "memory_layout": "channels_last",
    "fused_optimizer": True,
    "loss_chunk": 64,
    "recompute": "every_block",
    "schedule": "warmup_cosine",
    "learning_rate_scale": 3.0,
    "clip_norm": 1.0,
}


@given(st.sets(st.sampled_from(sorted(VALUES))), st.data())
def test_a_reduced_plan_has_the_changes_that_it_keeps_and_no_others(names, data):
    plan = Plan.fixed(32, **{name: VALUES[name] for name in names})
    assert set(changes_of(plan, PLAIN)) == names
    kept = data.draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
    found = with_only(plan, kept, PLAIN)
    assert set(changes_of(found, PLAIN)) == kept
    assert all(getattr(found, name) == getattr(plan, name) for name in kept)
    assert set(found.changes) == kept


def test_a_change_is_what_differs_from_the_loop_whatever_the_plan_calls_it():
    half = Reference("bf16", clip_norm=1.0)
    plan = Plan.fixed(32, precision="bf16", clip_norm=1.0, fused_optimizer=True)
    assert plan.changes == ("precision", "fused_optimizer", "clip_norm")
    assert changes_of(plan, half) == ("fused_optimizer",)
    assert changes_of(Plan.fixed(32), half) == ("precision", "clip_norm")
    back = with_only(Plan.fixed(32), (), half)
    assert (back.precision.value, back.clip_norm.value, back.plan_kind) == ("bf16", 1.0, "equivalent")
    own = replace(Plan.fixed(32).fused_optimizer, value=True)
    plan = replace(Plan.fixed(32, precision="bf16"), fused_optimizer=own)
    assert changes_of(plan, PLAIN) == ("precision",)
    assert with_only(plan, (), PLAIN).fused_optimizer.value is True
    plan = replace(Plan.fixed(32, micro_batch=8, precision="bf16"), check=None)
    refused = replace(plan, micro_batch=Choice(8, "asked for", Effect.TRAINING, changed=True))
    assert with_only(refused, ("micro_batch",), PLAIN).plan_kind == "tuned"
    assert with_only(refused, ("precision",), PLAIN).plan_kind == "equivalent"


def test_what_belongs_to_a_change_goes_with_it():
    plan = Plan.fixed(32, batch_rule=BatchRule("goodput"))
    plan = plan.recomputing("(0) 1", ("a", "b"), "memory")
    assert changes_of(plan, PLAIN) == ("recompute", "batch_policy")
    without = with_only(plan, (), PLAIN)
    assert (without.recompute_blocks, without.batch_rule) == ((), None)
    assert with_only(plan, ("recompute",), PLAIN).recompute_blocks == ("a", "b")
    assert with_only(plan, ("batch_policy",), PLAIN).batch_rule == plan.batch_rule
    plan = Plan.fixed(32, schedule="warmup_cosine", warmup_fraction=0.17, learning_rate_scale=24.0)
    assert changes_of(plan, PLAIN) == ("schedule", "learning_rate_scale")
    plans, refusals = plans_of(plan, AblationDesign(changes_of(plan, PLAIN)), PLAIN)
    assert refusals == {}
    rises = {name: (each.schedule.value, each.warmup_fraction.value) for name, each in plans.items()}
    assert rises["with_schedule"] == rises[PLAN] == ("warmup_cosine", 0.17)
    assert rises["with_learning_rate_scale"] == rises[UNCHANGED] == ("user", None)
    plan = replace(
        Plan.fixed(32, precision="bf16"), predicted=MeasuredCost(1.0), measured=MeasuredCost(1.0), verified=(1.1, 1.2)
    )
    found = with_only(plan, (), PLAIN)
    assert (found.predicted, found.measured, found.verified) == (None, None, None)


def test_all_changes_over_each_have_the_noise_of_so_many_loops():
    """Of n: a plan, n loops with one change, and the unchanged one n - 1 times over; an interaction is of four."""
    rng = random.Random(0)

    def noise(changes: int) -> float:
        plan, unchanged = rng.gauss(0, 1), rng.gauss(0, 1)
        return plan - unchanged - sum(rng.gauss(0, 1) - unchanged for _ in range(changes))

    for changes in (3, 5):
        spread = statistics.pstdev(noise(changes) for _ in range(4000))
        assert spread / 2 == pytest.approx(power_of_all(changes), rel=0.05)


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize("count", range(6))
def test_a_design_runs_each_set_of_changes_once(count, pairwise):
    names = ("precision", "micro_batch", "recompute", "compiled", "loss_chunk")[:count]
    design = AblationDesign(names, pairwise)
    arms = design.arms
    assert len(set(arms.values())) == len(arms)
    assert all(design.name_of(changes) == name for name, changes in arms.items())
    assert all(name.replace("_", "").isalpha() for name in arms)
    for change in names:
        for with_it, without in (design.alone(change), design.within(change)):
            assert arms[with_it] - arms[without] == {change}
            assert arms[without] < arms[with_it]
        assert (arms[design.alone(change)[1]], arms[design.within(change)[0]]) == (frozenset(), frozenset(names))
    for one, other in design.pairs:
        assert arms[design.beside(one, other)[0]] == {one, other}
    told = count == 3 or (pairwise and count > 2)
    assert design.pairs == (tuple(itertools.combinations(names, 2)) if told else ())
    assert set(design.controls.values()) == {0: set(), 1: {UNCHANGED}}.get(count, {UNCHANGED, PLAN})


def test_a_change_that_needs_another_says_so():
    plan = Plan.fixed(16, num_ranks=2, zero_stage=2, reduces_once=False)
    design = AblationDesign(changes_of(plan, PLAIN))
    assert design.changes == ("zero_stage", "reduces_once")
    plans, refusals = plans_of(plan, design, PLAIN)
    assert set(plans) == {UNCHANGED, "with_zero_stage", PLAN}
    assert set(refusals) == {"with_reduces_once"}
    assert "plan.reduces_once: got False" in refusals["with_reduces_once"]
    assert plans[UNCHANGED].zero_stage.value == 0
