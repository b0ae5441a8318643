"""Whole messages of planning: an infeasible budget, advice, and a rejected alternative."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import MIB, Machine, measured, planned

from trimtab.core.errors import InfeasibleError
from trimtab.core.objective import Budget, Objective
from trimtab.planner.plan_choice import choose


def test_an_infeasible_budget_names_the_nearest_settings():
    with pytest.raises(InfeasibleError) as caught:
        planned(Machine(split_s=0.2), budget=Budget(time=0.3), can_retain=False, supports_fused=False)
    assert str(caught.value) == (
        "No settings meet the budget. The nearest are fp32, micro-batch 64: 1 s per step is over the budget of 300 ms. "
        "Raise the budget: the nearest settings need 740 MiB and are predicted to take 1 s per step."
    )


def test_a_loop_that_waits_for_data_is_advised_to_use_more_workers():
    profile = replace(measured(Machine()), phases_s={"data": 0.1, "forward": 0.4, "backward": 0.5})
    (advice,) = choose(profile, Objective(), Budget()).advice
    assert str(advice) == (
        "The step waits for data for 10% of its time. Increase `num_workers` of the DataLoader, and on a GPU set "
        "`pin_memory=True`."
    )


def test_a_setting_over_the_budget_is_rejected_with_both_sizes():
    plan = planned(Machine(split_s=0.2), budget=Budget(memory=300 * MIB))
    (whole,) = [each for each in plan.micro_batch.rejected if each.value == 64]
    assert (whole.code, whole.reason) == ("budget.memory", "peak memory 740 MiB is over the budget of 300 MiB")
