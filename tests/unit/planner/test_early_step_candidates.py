"""A step within the backward pass is tried where memory asks for it, and its memory predicted from traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from raising import raises
from simulated_machine import MIB, Machine, measured, planned

from trimtab.core.choice import COMPILED_BLOCKS, CUDA_GRAPHS, SplitCheck
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.cost_model import CostModel
from trimtab.planner.multi_rank_plan import of_any_rank
from trimtab.planner.plan_choice import choose
from trimtab.planner.search_space import is_in_conflict
from trimtab.plans.profile import Candidate, Trial

CAN_STEP = {"by_parameter_refusal": "", "can_retain": False, "has_convolutions": False, "supports_fused": False}
SAVES = 150 * MIB
WHOLE = Machine().peak_bytes(Candidate(64))
LIMIT = Budget(memory=WHOLE - 100 * MIB)
REFUSED = SplitCheck(False, "rows see each other")


def machine(**how):
    return Machine(**{"gradient_bytes": SAVES, "early_speed": 0.95} | how)


def stages(made):
    return [stage.name for stage in made.stages]


def test_it_meets_a_limit_that_would_need_micro_batches():
    made = machine()
    plan = planned(made, budget=LIMIT, **CAN_STEP)
    assert plan.step_in_backward.value is True
    assert plan.micro_batch.value == 64
    assert plan.measured.peak_bytes == WHOLE - SAVES
    (note,) = (note for note in plan.notes if note.code == "step_in_backward.saves")
    assert "150 MiB" in note.text
    (note,) = (note for note in plan.notes if note.code == "step_in_backward.no_gradients")
    assert "keeps_gradients" in note.text


def test_the_declaration_of_kept_gradients_is_a_truth_value():
    with raises(ValueGivenError, code="value.invalid", field="reference.keeps_gradients"):
        Reference(keeps_gradients="no")


def test_a_slow_early_step_loses_to_micro_batches():
    plan = planned(machine(early_speed=0.5, split_s=0.05), budget=LIMIT, **CAN_STEP)
    assert (plan.step_in_backward.value, plan.micro_batch.value) == (False, 32)


def test_it_is_chosen_if_memory_is_weighed():
    objective = Objective(time=1, memory=2)
    plan = planned(machine(), objective=objective, check=REFUSED, **CAN_STEP)
    assert plan.step_in_backward.value is True
    assert plan.step_in_backward.code in ("trial.less_memory", "predicted.best")


def test_without_a_limit_or_weight_it_costs_nothing():
    made = machine()
    plan = planned(made, **CAN_STEP)
    assert "step_in_backward" not in stages(made)
    assert (plan.step_in_backward.value, plan.step_in_backward.code) == (False, "step_in_backward.not_needed")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"reference": Reference(clip_norm=1.0)}, "step_in_backward.gradient_needed"),
        ({"reference": Reference(keeps_gradients=True)}, "step_in_backward.gradient_needed"),
        ({"reference": Reference(accumulate=2)}, "step_in_backward.splits"),
        ({"bitwise_only": "the model has a gradient hook"}, "step_in_backward.hooks"),
        ({"by_parameter_refusal": "LBFGS needs all gradients"}, "step_in_backward.optimizer"),
    ],
)
def test_a_loop_that_needs_the_whole_gradient_is_refused_with_a_code(how, code):
    made = machine()
    profile = measured(made, budget=Budget(memory=2 * WHOLE), **CAN_STEP | how)
    assert "step_in_backward" not in stages(made)
    assert choose(profile, Objective(), profile.budget).step_in_backward.code == code


def test_it_is_tried_on_one_micro_batch_in_another_precision_than_fp16():
    made = machine(speed={"fp16": 3.0, "bf16": 2.0})
    measured(made, budget=LIMIT, **CAN_STEP)
    (stage,) = (stage for stage in made.stages if stage.name == "step_in_backward")
    assert [c.step_in_backward for c in stage.candidates] == [False, True]
    assert {c.micro_batch for c in stage.candidates} == {64}
    assert {c.precision for c in stage.candidates} == {"bf16"}


def test_it_is_not_tried_if_the_whole_batch_does_not_fit_with_it():
    made = machine()
    measured(made, budget=Budget(memory=WHOLE // 3), **CAN_STEP)
    assert "step_in_backward" not in stages(made)


@pytest.mark.parametrize("values", [{"micro_batch": 32}, {"precision": "fp16"}, {"compiled": CUDA_GRAPHS}])
def test_combinations_that_no_plan_can_have_are_left_out(values):
    assert is_in_conflict(Candidate(64).having(step_in_backward=True, **values), 64)
    assert not is_in_conflict(Candidate(64, step_in_backward=True), 64)


def test_ranks_never_get_it():
    profile = measured(machine(), budget=LIMIT, **CAN_STEP)
    assert any(trial.candidate.step_in_backward for trial in profile.trials)
    assert not any(trial.candidate.step_in_backward for trial in of_any_rank(profile).trials)


@pytest.mark.parametrize(("compiled", "saves"), [(True, 0), (COMPILED_BLOCKS, SAVES)])
def test_a_backward_compiled_as_a_whole_returns_all_gradients_at_once(compiled, saves):
    profile = measured(machine(), budget=LIMIT, **CAN_STEP)
    counted = Trial("compile", Candidate(64, compiled=compiled), (0.5,) * 5, WHOLE - 50 * MIB)
    model = CostModel(replace(profile, trials=(*profile.trials, counted)))
    late, early = (model.predict(Candidate(64, compiled=compiled, step_in_backward=on)) for on in (False, True))
    assert late.peak_bytes - early.peak_bytes == saves
