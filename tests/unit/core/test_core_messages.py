"""Whole messages of core errors, and the text of a plan that was set by hand."""

from __future__ import annotations

import pytest

from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import UsageError
from trimtab.core.objective import Objective
from trimtab.core.plan import Plan

MESSAGES = [
    (
        lambda: Plan.fixed(8, num_ranks=2),
        "plan.num_ranks=2 needs plan.zero_stage, which is None. Set zero_stage to 0 for DDP, or to 1, 2 or 3 for ZeRO.",
    ),
    (
        lambda: BatchRule(policy="variance"),
        "policy='variance' needs sigma2_target, the target variance of the gradient. "
        'Take it from the gradient variance in a run\'s record, or use policy="goodput".',
    ),
    (
        lambda: Objective(0, 0, 1).without_energy(),
        "The objective weights only energy, and this machine has no energy meter. Give time or memory a weight too, "
        "pass watts with trimtab.Metering(watts=...), or plan on a machine with an energy meter.",
    ),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_an_error_says_what_is_wrong_and_what_to_do(call, message):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == message


def test_a_plan_set_by_hand_is_neither_measured_nor_proved():
    first, _, baseline, *_ = str(Plan.fixed(8, 4, precision="bf16")).splitlines()
    assert first == (
        "Change micro batch 4, precision bf16: set by hand, neither measured nor proved. The split into micro-batches "
        "is not proved to keep the gradient of the whole batch."
    )
    assert baseline == "baseline: assumed fp32 eager loop, 8 samples per step"
