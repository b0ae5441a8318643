"""A loop on a device whose seconds and bytes cannot be measured is refused by name, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import ModelError
from trimtab.core.plan import Plan

BATCH = (torch.randn(4, 3),)


def loop(*devices):
    model = nn.Sequential(*(nn.Linear(3, 3, device=device) for device in devices))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def never(model, batch):
    raise AssertionError("the loss was computed")


DOORS = {
    "Subject": Subject,
    "profile": trimtab.profile,
    "plan": trimtab.plan,
    "adapt": lambda *given: trimtab.plan(*given, adapt="learning_rate", data=[BATCH]),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (("meta", "meta"), "parameters on meta", "parameters on cpu or cuda"),
        (("cpu", "meta"), "parameters on ['cpu', 'meta']", "one device"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused(door, devices, given, expected):
    with pytest.raises(ModelError) as caught:
        door(*loop(*devices), never, BATCH)
    assert (caught.value.field, caught.value.given) == ("model", given)
    assert caught.value.expected.startswith(expected)


@pytest.mark.parametrize("device", ["mps", "xpu:1"])
def test_the_refusal_names_the_device_and_the_way_out(monkeypatch, device):
    monkeypatch.setattr(Subject, "device", torch.device(device))
    with pytest.raises(ModelError, match=rf"^model: given parameters on {device}; .* Move the model to one of them"):
        Subject(*loop("cpu"), never, BATCH)


def test_what_is_only_applied_is_not_measured():
    """start() measures nothing: a plan written by hand is not refused for its device."""
    model, optimizer = loop("meta")
    with trimtab.start(model, optimizer, Plan.fixed(4, 2)) as run:
        run.train_step(run.window(BATCH), lambda model, batch: model(batch[0]).mean())
