"""Iterators, queues, shared memory and objects of packages that a loss draws from: restored or named."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import itertools
import multiprocessing
import queue
import sys
import threading
import types
import weakref

import pytest
import torch
from small_loops import sgd
from torch import nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader

from trimtab.state.loop_state import LoopState

MANY = list(range(1000))
model = nn.Linear(2, 2)


class Own:
    """An iterator of the user's."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


def counting():
    number = 0
    while True:
        yield number
        number += 1


def repeated(values):
    for _ in values:
        yield 1


def of_this_thread():
    place = threading.local()
    place.number = 0
    return place


def in_weak_keys(held):
    held[model] += 1
    return held[model]


def first(values):
    values[0] += 1
    return values[0]


def value(holder):
    holder.value += 1
    return holder.value


def number(holder):
    holder.number += 1
    return holder.number


def called(function):
    return function()


RESTORED = {
    "own": (Own, next),
    "sobol": (lambda: SobolEngine(2), lambda engine: engine.draw(2).tolist()),
    "queue": (lambda: of_queue(queue.Queue()), lambda held: held.get(block=False)),
    "array": (lambda: array.array("d", [0.0, 1.0]), first),
    "ctypes": (ctypes.c_int, value),
    "ctypes array": (ctypes.c_int * 2, first),
    "Value": (lambda: multiprocessing.Value("i", 0), value),
    "RawArray": (lambda: multiprocessing.RawArray("i", 2), first),
    "weak keys": (lambda: weakref.WeakKeyDictionary({model: 1}), in_weak_keys),
    "thread": (of_this_thread, number),
}
NOTICED = {
    "count": (itertools.count, next),
    "count by a step": (lambda: itertools.count(0.5, 0.25), next),
    "cycle": (lambda: itertools.cycle("abc"), next),
    "cycle, first time": (lambda: itertools.cycle(MANY), next),
    "iterator of a list": (lambda: iter(MANY), next),
    "iterator of a tuple": (lambda: iter(tuple(MANY)), next),
    "iterator of a range": (lambda: iter(range(1000)), next),
    "iterator of a deque": (lambda: iter(collections.deque(MANY)), next),
    "reversed": (lambda: reversed(MANY), next),
    "enumerate": (lambda: enumerate(iter(MANY)), next),
    "zip": (lambda: zip(itertools.count(), itertools.cycle("abc"), strict=False), next),
    "map": (lambda: map(str, itertools.count()), next),
    "islice": (lambda: itertools.islice(itertools.count(), 1000), next),
    "chain": (lambda: itertools.chain([1, 2], MANY), next),
    "tee": (lambda: itertools.tee(itertools.count())[0], next),
    "bound": (lambda: itertools.count().__next__, called),
    "in a list": (lambda: [itertools.count()], lambda held: next(held[0])),
    "in an object": (lambda: types.SimpleNamespace(a=itertools.count()), lambda held: next(held.a)),
    "generator": (counting, next),
    "generator over a list": (lambda: repeated(MANY), next),
    "delegating": (lambda: (each for each in itertools.count()), next),
    "iterator of a dict": (lambda: iter(dict.fromkeys(MANY)), next),
    "iterator of a loader": (lambda: iter(DataLoader(MANY)), next),
    "zip of a generator": (lambda: zip(counting(), MANY, strict=False), next),
    "queue of C": (lambda: of_queue(queue.SimpleQueue()), lambda held: held.get(block=False)),
    "pairwise": (lambda: itertools.pairwise(itertools.count()), next),
}


def of_queue(held):
    for each in range(100):
        held.put(each)
    return held


def in_closure(held, use):
    return lambda model, batch: use(held)


def in_default(held, use):
    def loss(model, batch, held=held):
        return use(held)

    return loss


def in_keyword(held, use):
    def loss(model, batch, *, held=held):
        return use(held)

    return loss


def in_partial(held, use):
    return functools.partial(lambda model, batch, held: use(held), held=held)


def in_attribute(held, use):
    class Loss:
        def __init__(self):
            self.held = held

        def __call__(self, model, batch):
            return use(self.held)

    return Loss()


PLACES = [in_closure, in_default, in_keyword, in_partial, in_attribute]


@pytest.mark.parametrize("name", RESTORED)
@pytest.mark.parametrize("place", PLACES)
def test_state_that_a_loss_changes_is_restored_also_by_states_inside_of_states(place, name):
    make, use = RESTORED[name]
    loss = place(make(), use)
    loss(None, None)
    outer = LoopState(model, loss_fn=loss)
    expected = [loss(None, None) for _ in range(3)]
    outer.restore()
    for _ in range(2):
        inner = LoopState(model, loss_fn=loss)
        assert [loss(None, None) for _ in range(3)] == expected
        assert inner.changes()
        assert not inner.not_restorable()
        inner.restore()
        assert inner.changes() == outer.changes() == []
    loss(None, None)
    assert outer.changes()
    outer.restore()
    outer.restore()
    assert [loss(None, None) for _ in range(3)] == expected


@pytest.mark.parametrize("name", NOTICED)
def test_an_iterator_is_named_once_it_was_drawn_from(name):
    make, use = NOTICED[name]
    held = make()
    loss = in_closure(held, use)
    use(held)
    state = LoopState(model, loss_fn=loss)
    assert state.changes() == state.not_restorable() == []
    loss(None, None)
    (change,) = state.not_restorable()
    assert change.path.startswith("held")
    assert change in state.changes()
    state.restore()
    assert state.not_restorable() == [change]


@pytest.mark.parametrize("name", [*RESTORED, *NOTICED])
def test_what_no_loss_draws_from_is_no_change(name):
    make, use = (RESTORED | NOTICED)[name]
    held = make()
    use(held)
    state = LoopState(model, loss_fn=lambda model, batch: held)
    state.restore()
    assert state.changes() == state.not_restorable() == []


class Average:
    """A moving average as packages keep one: shadows in a list, a number, and weak references."""

    def __init__(self, parameters):
        self.references = [weakref.ref(each) for each in parameters]
        self.shadows = [each.detach().clone() for each in parameters]
        self.num_updates, self.lock, self.slots = 0, threading.Lock(), {"seen": []}

    @torch.no_grad()
    def update(self):
        self.num_updates += 1
        self.slots["seen"].append(1)
        for shadow, reference in zip(self.shadows, self.references, strict=True):
            shadow.lerp_(reference(), 0.1)


@pytest.fixture
def packaged(monkeypatch):
    """The class above as a class of an installed package."""
    package = types.ModuleType("some_averages")
    package.__file__ = "/lib/site-packages/some_averages/__init__.py"
    monkeypatch.setitem(sys.modules, "some_averages", package)
    monkeypatch.setattr(Average, "__module__", "some_averages")


@pytest.mark.parametrize("where", ["loss", "hook of the optimizer"])
def test_objects_of_packages_are_restored_whatever_else_they_refer_to(packaged, where):
    net = nn.Linear(2, 2)
    optimizer = sgd(net)
    average = Average(list(net.parameters()))
    for shadow in average.shadows:
        shadow.zero_()
    if where != "loss":
        optimizer.register_step_post_hook(lambda *_: average.update())
    loss = (lambda model, batch: average.update()) if where == "loss" else None
    state = LoopState(net, optimizer, loss_fn=loss)
    average.update()
    assert {"num_updates", "shadows[0]"} <= {
        each.path.partition(" in")[0].partition("average.")[2] for each in state.changes()
    }
    state.restore()
    assert not state.changes()
    assert (average.num_updates, average.slots) == (0, {"seen": []})
    assert not any(each.any() for each in average.shadows)


def test_lists_that_are_only_added_to_are_emptied_again_and_count_as_no_change():
    losses, names, seen = [torch.zeros(1)], {"a": 1}, set()

    def loss_fn(model, batch):
        losses.append(torch.ones(1, requires_grad=True) * 2)
        names.update(b=2)
        seen.add(3)

    state = LoopState(model, loss_fn=loss_fn)
    for _ in range(3):
        loss_fn(None, None)
    assert not state.changes()
    state.restore()
    assert (len(losses), names, seen) == (1, {"a": 1}, set())
