"""Whole messages of planning, as a reader who has not seen the library meets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import LossError, ValueGivenError
from trimtab.profiling.measurement_notes import loss_failed


def test_a_loss_that_does_not_call_the_model():
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LossError) as caught:
        trimtab.profile(model, optimizer, lambda m, batch: m[0](batch).sum(), torch.randn(8, 4))
    assert str(caught.value) == (
        "loss_fn did not call model(...), so settings of a plan would have no effect on the loss. Call the model that "
        "is passed to loss_fn, not a copy, a submodule or another method of it. To use another method, pass a module "
        "whose forward calls that method."
    )


def test_a_schedule_without_a_rate():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 4)
    with pytest.raises(ValueGivenError) as caught:
        trimtab.plan(model, optimizer, lambda m, b: m(b).sum(), batch, adapt="schedule", data=[batch])
    assert caught.value.code == "adapt.schedule_without_rate"
    assert str(caught.value) == (
        'adapt contains "schedule" without "learning_rate", but a planned schedule scales the planned peak learning '
        'rate. Pass adapt=("learning_rate", "schedule"), or remove "schedule" to keep your own scheduler.'
    )


def test_a_loss_that_raises():
    assert str(loss_failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))) == (
        "The forward and backward of the example batch failed, with all settings unchanged (RuntimeError: mat1 and "
        "mat2 shapes cannot be multiplied). Run loss_fn(model, batch).backward() yourself, and correct the model, the "
        "loss function or the batch."
    )
