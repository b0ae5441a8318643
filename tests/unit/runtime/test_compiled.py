"""A model that is compiled in place: the same object, compiled once however often it is started, and left as it was."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import trimtab
from trimtab.core.errors import LoopError
from trimtab.core.plan import Plan
from trimtab.runtime.compiled import is_compiled, use_compiled

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


class Model(nn.Module):
    """With a forward of its own: torch compiles nothing of a bare nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def loop():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)


def loss_fn(model, batch):
    return model(batch).square().mean()


def train(compiled: bool, steps: int = 3):
    model, optimizer, batch = loop()
    torch.manual_seed(1)
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=compiled)) as run:
        losses = [run.train_step(run.window(batch), loss_fn) for _ in range(steps)]
    return torch.stack(losses), model


@needs_compiler
def test_dropout_draws_the_same_masks_and_the_training_is_the_same():
    (ours, model), (plain, other) = train(compiled=True), train(compiled=False)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@needs_compiler
def test_a_model_is_compiled_once_however_often_it_is_started():
    model, optimizer, batch = loop()
    graphs = []
    for _ in range(12):  # torch compiles nothing for the ninth time
        with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
            run.train_step(run.window(batch), loss_fn)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs == graphs[:1] * 12


def test_it_is_put_back():
    model, optimizer, _ = loop()
    assert not is_compiled(model)
    run = trimtab.start(model, optimizer, Plan.fixed(4, compiled=True))
    assert is_compiled(model)
    assert not is_compiled(copy.deepcopy(model))
    run.close()
    assert not is_compiled(model)
    assert "_compiled_call_impl" not in vars(model)


def test_a_part_that_is_compiled_makes_the_model_compiled():
    model, *_ = loop()
    undo = use_compiled(model.layers[0], lambda: None)
    assert is_compiled(model)
    undo()
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model))


@needs_compiler
def test_a_forgotten_model_is_found_though_it_is_compiled():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
        run.train_step(run.window(batch), loss_fn)
        other = copy.deepcopy(model)
        with pytest.raises(LoopError, match=r"forward of run\.model"):
            run.train_step(run.window(batch), lambda _, rows: loss_fn(other, rows))
