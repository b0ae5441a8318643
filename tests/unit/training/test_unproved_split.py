"""A plan that splits a batch without a proof is warned of when it starts."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import trimtab
from trimtab.core.choice import SplitCheck


def start(plan):
    """Start and close a run; returns the warnings."""
    model = torch.nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan).close()
    return [each for each in seen if issubclass(each.category, trimtab.UnprovedSplitWarning)]


def test_a_split_set_by_hand_is_warned_of_where_it_is_started():
    (found,) = start(trimtab.Plan.fixed(8, micro_batch=4))
    assert found.filename == __file__


@pytest.mark.parametrize(
    "plan",
    [
        trimtab.Plan.fixed(8),
        trimtab.Plan.fixed(8, precision="bf16", fused_optimizer=True),
        dataclasses.replace(trimtab.Plan.fixed(8, micro_batch=4), check=SplitCheck(True, "proved")),
        dataclasses.replace(trimtab.Plan.fixed(8), check=SplitCheck(False, "batch statistics")),
    ],
    ids=["whole", "other settings", "proved", "refused and whole"],
)
def test_other_plans_are_not(plan):
    assert not start(plan)


def test_a_split_that_its_check_refused_is_warned_of_with_the_reason():
    plan = dataclasses.replace(
        trimtab.Plan.fixed(8, micro_batch=4), check=SplitCheck(False, "the loss compares samples")
    )
    (found,) = start(plan)
    assert "the loss compares samples" in str(found.message)
