"""Public training patterns through plans set by hand: equal to the plain loop, warned of, or refused; never silent.

A pattern of a kind is planned here too; all of them are in tests/soak.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from training_patterns import PATTERNS, PLANS
from training_patterns.outcomes import outcome, planned_outcomes
from training_patterns.script import trimtab_loop

import trimtab

pytestmark = pytest.mark.slow

PLANNED = (
    "byol",
    "clipped_by_tensor_hooks",
    "curriculum_counter",
    "detection_lists",
    "gradient_penalty",
    "graph_object",
    "layer_wise_steps_in_backward",
    "loader_with_own_generator",
    "loss_and_accuracy",
    "mixture_of_experts",
    "moco_queue_attribute",
    "multi_task_uncertainty",
    "noise_by_own_generator",
    "popped_labels",
    "scripted",
    "token_sums",
)


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("name", PATTERNS)
def test_training_by_a_plan_set_by_hand_is_equal_warned_of_or_refused(name, plan_name):
    found = outcome(name, plan_name)
    if plan_name == "bf16" and "could not create a primitive" in found.detail:
        pytest.skip("oneDNN has no bf16 kernel for this model on this machine")
    assert found.kind == PATTERNS[name].outcomes.get(plan_name, "equal"), found.detail


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.usefixtures("brief_trials")
def test_training_by_a_plan_is_equal_warned_of_or_refused(name):
    for plan_name, found in planned_outcomes(name).items():
        assert found.kind == PATTERNS[name].outcomes.get(plan_name, "equal"), f"{plan_name}: {found.detail}"


def test_the_matrix_has_a_row_for_each_of_many_patterns():
    assert len(PATTERNS) >= 150


def half_the_rate(script, plan):
    """Train at half the learning rate."""
    for group in script.optimizer.param_groups:
        group["lr"] /= 2
    trimtab_loop(script, plan)


def half_the_rate_with_a_warning(script, plan):
    warnings.warn("the learning rate is halved", stacklevel=1)
    half_the_rate(script, plan)


def other_buffer(script, plan):
    trimtab_loop(script, plan)
    script.model.register_buffer("more", torch.zeros(1))
    script.model[0].bias.data[0] += 1


def refused_too_late(script, plan):
    trimtab_loop(script, plan)
    raise trimtab.errors.LossError("loss", got="a loss", expected="another")


def refused_after_a_draw(script, plan):
    torch.rand(1)
    raise trimtab.errors.LossError("loss", got="a loss", expected="another")


def another_error(script, plan):
    raise RuntimeError("a kernel")


@pytest.mark.parametrize(
    ("through", "kind"),
    [
        (None, "equal"),
        (half_the_rate, "differs"),
        (half_the_rate_with_a_warning, "warned"),
        (other_buffer, "differs"),
        (refused_too_late, "changed"),
        (refused_after_a_draw, "changed"),
        (another_error, "untyped"),
    ],
)
def test_a_fault_in_training_is_seen(monkeypatch, through, kind):
    pattern = PATTERNS["classification"]
    build = lambda: replace(pattern.build(), through=through)  # noqa: E731
    monkeypatch.setitem(PATTERNS, "classification", replace(pattern, build=build))
    assert outcome("classification", "unchanged").kind == kind
