"""Whole messages of the commands for experiments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_task import task as tiny

from trimtab.core.errors import ValueGivenError
from trimtab.experiments.task_plans import given_plan
from trimtab.experiments.task_ranks import refuse_on_ranks, task_of_rank
from trimtab.plans.plan import Plan


def test_a_plan_for_another_batch_size():
    with pytest.raises(ValueGivenError) as caught:
        given_plan(tiny, Plan.fixed(64))
    assert str(caught.value) == (
        "The plan is for 64 samples per step, but tiny has 32. Make a plan with `trimtab plan` for tiny."
    )


def test_more_ranks_than_samples():
    with pytest.raises(ValueGivenError) as caught:
        task_of_rank(tiny, 33)
    assert str(caught.value).endswith("Use at most 32 ranks, or a larger batch.")
    assert str(caught.value).startswith("33 ranks cannot share a batch of 32 samples")


def test_a_step_function_on_several_ranks():
    with pytest.raises(ValueGivenError) as caught:
        refuse_on_ranks(replace(tiny, step=lambda model, optimizer, batch: None), 2)
    assert str(caught.value) == (
        "Task tiny has a step function, which does not reduce gradients over 2 ranks. Remove --ranks; or remove "
        "task.step, and the baseline is the plain loop in DistributedDataParallel."
    )
