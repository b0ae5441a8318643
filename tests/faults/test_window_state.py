"""A window that is repeated or skipped begins with the state that the first attempt found, whatever forwards change."""

from __future__ import annotations

import contextlib
import copy
import math
import random

import numpy
import pytest
import torch
from torch import nn

import trimtab
from trimtab.plans.plan import Plan

ROWS, WINDOWS = 8, 5


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x) * self.factor(x)


class Teacher(Base):
    """A slow copy that the forward moves."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(4, 4).requires_grad_(False)

    def factor(self, x):
        with torch.no_grad():
            self.slow.weight.lerp_(self.body.weight, 0.3)
            self.slow.bias.data.add_(0.1)
        return self.slow(x)


class Queue(Base):
    def __init__(self):
        super().__init__()
        self.queue, self.at = torch.zeros(4, 4), 0

    def factor(self, x):
        self.queue[self.at % 4] = x.detach().mean(0)
        self.at += 1
        return 1 + self.queue.mean(0)


class Growing(Base):
    """A memory that is replaced by a longer one."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(1, 4)

    def factor(self, x):
        self.memory = torch.cat([self.memory, x.detach().mean(0, keepdim=True)])[-5:]
        return 1 + self.memory.mean(0)


class Past(Base):
    def __init__(self):
        super().__init__()
        self.past = {"all": [torch.zeros(4)]}

    def factor(self, x):
        self.past["all"].append(x.detach().mean(0))
        return 1 + torch.stack(self.past["all"]).mean(0)


class Resized(Base):
    """Buffers that are resized in place, and replaced by longer ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("lazy", None)

    def factor(self, x):
        with torch.no_grad():
            count = len(self.seen)
            self.seen.resize_(count + 1)
            self.seen[count] = x.mean()
            self.kept = torch.cat([self.kept, x.mean()[None]])
            self.lazy = x.mean() if self.lazy is None else self.lazy + 1
        return 1 + self.seen.mean() + self.kept.mean() + self.lazy


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.meter = type("Meter", (), {})()
        self.calls = self.meter.calls = 0

    def factor(self, x):
        self.calls += 1
        self.meter.calls += 1
        return 1 / self.calls + 1 / self.meter.calls


class Table(Base):
    def __init__(self):
        super().__init__()
        self.table = numpy.zeros(2)

    def factor(self, x):
        self.table[0] += 1
        return 1 / float(self.table[0])


BANK, COUNT = {"keys": torch.zeros(4)}, 0


class Outside(Base):
    """State in globals that the forward refers to."""

    def factor(self, x):
        global COUNT
        COUNT += 1
        BANK["keys"] = 0.5 * BANK["keys"] + x.detach().mean(0)
        return 1 + BANK["keys"] / COUNT


class Random(Base):
    def __init__(self):
        super().__init__()
        self.generator, self.own = torch.Generator().manual_seed(0), random.Random(0)

    def factor(self, x):
        noise = torch.rand(4, generator=self.generator)
        return noise + self.own.random() + random.random() + numpy.random.rand()


def build(kind):
    global COUNT
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    BANK["keys"], COUNT = torch.zeros(4), 0
    model = kind().double()
    return model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)


def batches():
    return [torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(WINDOWS)]


def state_of(model):
    held = {name: vars(model).get(name) for name in ("queue", "at", "memory", "past", "calls", "table")}
    return repr([*model.state_dict().items(), held, vars(getattr(model, "meter", Base())).get("calls"), BANK, COUNT])


def loss_fn(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("kind", [Teacher, Queue, Growing, Past, Resized, Counter, Table, Outside, Random])
def test_a_window_that_ran_out_of_memory_is_repeated_from_its_start(kind, failing):
    """Against a run in the smaller micro-batches from that window on."""
    model, optimizer = build(kind)
    window, left = -1, 1

    def runs_out(model, x):
        nonlocal left
        loss = loss_fn(model, x)
        if window == failing and left:
            left -= 1
            raise torch.OutOfMemoryError("no")
        return loss

    with trimtab.start(model, optimizer, Plan.fixed(ROWS), out_of_memory="split") as run:
        for index, each in enumerate(run.windows(batches())):
            window = index
            with pytest.warns(RuntimeWarning) if index == failing else contextlib.nullcontext():
                run.train_step(each, runs_out)
    ours = state_of(model)
    model, optimizer = build(kind)
    for part, micro in ((batches()[:failing], ROWS), (batches()[failing:], ROWS // 2)):
        with trimtab.start(model, optimizer, Plan.fixed(ROWS, micro)) as run:
            for each in run.windows(part):
                run.train_step(each, loss_fn)
    assert state_of(model) == ours


@pytest.mark.parametrize("bad", [0, 2, 3])
@pytest.mark.parametrize("kind", [Teacher, Queue, Growing, Past, Resized, Counter, Table, Outside])
def test_a_skipped_window_leaves_no_trace(kind, bad):
    ends = []
    for skipped in (True, False):
        model, optimizer = build(kind)
        data = batches()
        if skipped:
            data[bad][0] = math.nan
        else:
            del data[bad]
        with trimtab.start(model, optimizer, Plan.fixed(ROWS), nonfinite="skip") as run:
            for each in run.windows(data):
                run.train_step(each, loss_fn)
        ends.append(state_of(model))
    assert ends[0] == ends[1]


def test_a_teacher_and_a_queue_that_only_the_loss_refers_to_are_restored_too():
    def trained(fails):
        model, optimizer = build(Counter)
        teacher, queue, left = copy.deepcopy(model.body), {"keys": torch.zeros(4).double()}, [1]

        def loss_with_teacher(model, x):
            with torch.no_grad():
                teacher.weight.data.lerp_(model.body.weight, 0.5)
                queue["keys"] = 0.5 * queue["keys"] + x.mean(0)
            loss = (model(x) - teacher(x + queue["keys"])).square().mean()
            if fails and left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("no")
            return loss

        plan = Plan.fixed(ROWS) if fails else Plan.fixed(ROWS, ROWS // 2)
        with trimtab.start(model, optimizer, plan, out_of_memory="split") as run:
            for each in run.windows(batches()):
                run.train_step(each, loss_with_teacher)
        return state_of(model), repr(teacher.weight), repr(queue)

    with pytest.warns(RuntimeWarning):
        ours = trained(True)
    assert ours == trained(False)


class Normalising(Base):
    """Changes the weight that the optimizer steps."""

    def factor(self, x):
        self.body.weight.data.div_(2 * self.body.weight.data.norm())
        return 1.0


def test_a_window_whose_start_cannot_be_restored_is_not_repeated():
    model, optimizer = build(Normalising)

    def runs_out(model, x):
        loss_fn(model, x)
        raise torch.OutOfMemoryError("no")

    with trimtab.start(model, optimizer, Plan.fixed(ROWS), out_of_memory="split") as run:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.train_step(run.window(batches()[0]), runs_out)
        assert any("body.weight" in each for each in caught.value.__notes__)
        assert run.window(batches()[0]).num_micro_batches == 1


def test_watching_ends_after_the_first_windows(monkeypatch):
    held = []
    from trimtab.training import window_snapshot

    class Watched(window_snapshot.LoopState):
        def __init__(self, *args, **how):
            held.append(run.applied_steps)
            super().__init__(*args, **how)

    monkeypatch.setattr(window_snapshot, "LoopState", Watched)
    model, optimizer = build(Teacher)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS), out_of_memory="split") as run:
        for each in run.windows(batches() * 2):
            run.train_step(each, loss_fn)
    assert held == [0, 1, 2, 5]
