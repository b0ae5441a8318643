"""Planning writes nothing by itself, waits for other threads' planning, and leaves a profiler session alone."""

from __future__ import annotations

import threading

import pytest
import torch
from small_loops import square_loss as loss_fn
from torch import nn

import trimtab
from trimtab.core.errors import LoopError
from trimtab.profiling import smoke_test

pytestmark = pytest.mark.usefixtures("brief_trials")


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters())


def planned(**options):
    model, optimizer = loop()
    return trimtab.plan(model, optimizer, loss_fn, torch.randn(32, 4), num_blocks=3, **options)


@pytest.mark.parametrize("budget", [None, trimtab.Budget(memory="30KiB")])
def test_nothing_is_written(capfd, budget):
    planned(budget=budget)
    assert capfd.readouterr() == ("", "")


def test_threads_that_plan_at_once_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(smoke_test, "can_fork", lambda: False)  # a child of a thread may be waited for in vain
    plans, errors = [], []

    def plan():
        try:
            plans.append(planned())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=plan) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(plans) == 2
    assert {plan.baseline.peak_bytes for plan in plans} == {plans[0].baseline.peak_bytes}


def test_an_active_profiler_session_is_refused_and_stays():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as session:
        torch.ones(3).add(1)
        with pytest.raises(LoopError) as caught:
            planned()
        torch.ones(3).mul(2)
    assert caught.value.code == "planning.profiler_active"
    assert {"aten::add", "aten::mul"} <= {event.name for event in session.events()}


def test_a_session_of_another_thread_stays_and_planning_works():
    ready, done, found = threading.Event(), threading.Event(), []

    def profiled():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
            torch.ones(3).add(1)
            ready.set()
            done.wait(60)
            torch.ones(3).mul(2)
        found.extend(event.name for event in session.events())

    thread = threading.Thread(target=profiled)
    thread.start()
    ready.wait(60)
    try:
        plan = planned()
    finally:
        done.set()
        thread.join()
    assert plan.baseline.peak_bytes is not None
    assert {"aten::add", "aten::mul"} <= set(found)
