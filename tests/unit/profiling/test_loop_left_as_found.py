"""Planning and what a loss draws from or fills: restored, refused for a split, or warned of."""

from __future__ import annotations

import itertools
import warnings

import brief
import pytest
import torch
from small_loops import class_loss as mean
from small_loops import sgd
from torch import nn
from torch.quasirandom import SobolEngine

import trimtab
from trimtab.measure import machine

ROWS = 6


@pytest.fixture(autouse=True)
def short(monkeypatch):
    brief.shorten(monkeypatch.setattr)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})


def counting():
    yield from itertools.count()


def planned(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = sgd(model)
    batch = torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))
    return trimtab.plan(model, optimizer, loss_fn, batch, num_blocks=3)


def test_a_source_of_numbers_stands_where_it_stood_and_its_loss_is_not_split():
    def make():
        return SobolEngine(1)

    use, steps = SobolEngine.draw, make()

    def annealed(model, batch):
        return mean(model, batch) * (1 + 1e-9 * float(use(steps)))

    use(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        plan = planned(annealed)
    assert (plan.check.code, [note.code for note in plan.notes]) == ("split.state_changes", [])
    other = make()
    use(other)
    assert use(steps) == use(other)


@pytest.mark.parametrize("make", [counting, itertools.count, lambda: itertools.cycle(range(7))])
def test_an_iterator_that_a_loss_draws_from_is_warned_of_once(make):
    steps = make()

    def annealed(model, batch):
        return mean(model, batch) * (1 + 1e-9 * next(steps))

    with pytest.warns(RuntimeWarning) as caught:
        plan = planned(annealed)
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1
    assert (plan.check.code, [note.code for note in plan.notes]) == ("split.state_changes", ["state.not_restored"])


def test_an_iterator_that_the_loss_does_not_draw_from_changes_no_verdict():
    held = [counting(), itertools.count(), iter([1])]
    plan = planned(lambda model, batch: mean(model, batch) * (1 if held else 0))
    assert plan.check.code == "split.proved"
    assert [next(each) for each in held] == [0, 0, 1]


def test_a_list_of_losses_stays_as_short_as_it_was_and_refuses_no_split():
    losses = []

    def added(model, batch):
        loss = mean(model, batch)
        losses.append(loss)
        return loss

    plan = planned(added)
    assert (plan.check.code, losses) == ("split.proved", [])
