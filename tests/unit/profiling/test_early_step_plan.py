"""A plan under a memory limit steps within the backward pass, and the counted peak of its run meets the limit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.serialization import from_json, to_json
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import alive_between_steps, peak_bytes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]


def loop():
    """Return a loop whose gradients are a quarter of its peak, and whose batch statistics forbid micro-batches."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(8))
    model = nn.Sequential(*layers, nn.Linear(256, 4)).double().train()
    batch = torch.randn(16, 256).double(), torch.randint(0, 4, (16,))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def counted(model, optimizer, batch, plan):
    with trimtab.start(model, optimizer, plan) as run:
        step = functools.partial(run.train_step, run.window(batch), loss_fn)
        step()
        optimizer.zero_grad(set_to_none=True)
        step = functools.partial(run.train_step, run.window(batch), loss_fn)
        return peak_bytes(step, torch.device("cpu"), lambda: [*alive_between_steps(model, optimizer), *batch])


def test_a_limit_that_only_freed_gradients_meet():
    model, optimizer, batch = loop()
    own = counted(*loop(), Plan.fixed(16))
    limit = int(0.9 * own)
    plan = trimtab.plan(model, optimizer, loss_fn, batch, memory=limit, num_blocks=3)
    assert plan.step_in_backward.value is True
    assert plan.proof.holds
    assert "step_in_backward" in plan.proof.settings
    found = counted(*loop(), from_json(Plan, to_json(plan)))
    assert found <= limit
    assert plan.predicted.peak_bytes == pytest.approx(found, rel=0.03)
    assert plan.measured.peak_bytes == pytest.approx(found, rel=0.03)


def test_a_tuned_plan_keeps_the_gradient_for_its_schedule():
    model, optimizer, batch = loop()
    adapts = {"adapt": "batch", "batch_rule": trimtab.BatchRule("fixed")}
    own = counted(*loop(), Plan.fixed(16))
    plan = trimtab.plan(model, optimizer, loss_fn, batch, memory=2 * own, num_blocks=3, **adapts)
    assert plan.step_in_backward.value is False
    assert plan.step_in_backward.code == "step_in_backward.gradient_needed"
