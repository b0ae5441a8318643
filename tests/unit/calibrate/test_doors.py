"""What cannot be measured is refused by name at every door, before anything runs: a device, a model in use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import LoopError, ModelError
from trimtab.core.plan import Plan
from trimtab.measure.snapshot import fingerprint

BATCH = (torch.randn(4, 3),)


def loop(*devices):
    model = nn.Sequential(*(nn.Linear(3, 3, device=device) for device in devices))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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


def mean_square(model, batch):
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("window", ["closed", "open"])
def test_a_model_with_an_active_run_is_refused_as_by_start(window, door):
    model, optimizer = loop("cpu", "cpu")
    model.insert(1, nn.Dropout(0.2))
    with trimtab.start(model, optimizer, Plan.fixed(4, 2, memory_layout="channels_last")) as run:
        run.train_step(run.window(BATCH), mean_square)
        micros = iter(run.window(BATCH))
        if window == "open":
            run.backward(mean_square(model, next(micros)))
        before, state = fingerprint(model, optimizer), run.state_dict()
        with pytest.raises(LoopError) as second:
            trimtab.start(model, optimizer, Plan.fixed(4, 2, memory_layout="channels_last"))
        with pytest.raises(LoopError) as caught:
            door(model, optimizer, never, BATCH)
        assert str(caught.value) == str(second.value)
        assert (fingerprint(model, optimizer), run.state_dict()) == (before, state)
        for micro in micros:
            run.backward(mean_square(model, micro))
        assert run.step()
    Subject(model, optimizer, mean_square, BATCH)  # free again
