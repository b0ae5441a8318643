"""A loop in the middle of a run is not planned: refused at the door, as a second start is, with nothing changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import LoopError
from trimtab.core.plan import Plan
from trimtab.measure.snapshot import fingerprint

ROWS = 4
BATCH = (torch.randn(ROWS, 3),)
SPLIT = Plan.fixed(ROWS, 2, memory_layout="channels_last")


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


def never(model, batch):
    raise AssertionError("the loss was computed")


DOORS = {
    "Subject": Subject,
    "profile": trimtab.profile,
    "plan": trimtab.plan,
    "adapt": lambda *given: trimtab.plan(*given, adapt="learning_rate", data=[BATCH]),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("window", ["closed", "open"])
def test_a_model_with_an_active_run_is_refused_as_by_start(window, door):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, SPLIT) as run:
        run.train_step(run.window(BATCH), loss_fn)
        micros = iter(run.window(BATCH))
        if window == "open":
            run.backward(loss_fn(model, next(micros)))
        before, state = fingerprint(model, optimizer), run.state_dict()
        with pytest.raises(LoopError) as second:
            trimtab.start(model, optimizer, SPLIT)
        with pytest.raises(LoopError) as caught:
            door(model, optimizer, never, BATCH)
        assert str(caught.value) == str(second.value)
        assert (fingerprint(model, optimizer), run.state_dict()) == (before, state)
        for micro in micros:
            run.backward(loss_fn(model, micro))
        assert run.step()
    Subject(model, optimizer, loss_fn, BATCH)  # free again
