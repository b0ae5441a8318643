"""Memory of a batch that is free: windows of two batches hold the first's gradients beside the second's forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.state.peak_memory import peak_bytes

pytestmark = pytest.mark.usefixtures("brief_trials")
ROWS = 512


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.0), mean_loss, torch.randn(ROWS, 512)


def mean_loss(model, x):
    return model(x).square().mean()


def peak_of_windows(plan, num_batches):
    """Return the peak bytes of a run's window of so many batches."""
    model, optimizer, loss_fn, batch = loop()
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch), loss_fn)
        return peak_bytes(
            lambda: run.train_step(run.window(*[batch] * num_batches), loss_fn),
            torch.device("cpu"),
            lambda: [*model.parameters(), batch],
        )


def test_a_limit_is_held_by_windows_of_two_batches():
    """One that the loop meets as it is, and would not if its windows spanned two batches."""
    as_it_is = trimtab.Plan.fixed(ROWS)
    one, two = (peak_of_windows(as_it_is, num_batches) for num_batches in (1, 2))
    assert two > 1.1 * one
    limit = trimtab.Budget(memory=(one + two) // 2)
    plan = trimtab.plan(*loop(), budget=limit, num_blocks=3, adapt="batch")
    assert plan.micro_batch.changed or plan.precision.changed
    assert plan.measured.peak_bytes <= limit.memory_bytes
    assert peak_of_windows(plan, 2) <= limit.memory_bytes
