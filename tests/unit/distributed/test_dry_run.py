"""Copies of a model and its optimizer, tied to each other alone, and how many blocks of windows a dry run takes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from trimtab.distributed import dry_run
from trimtab.distributed.dry_run import copied_together
from trimtab.plans.plan import Plan


class Runs:
    """A run whose blocks take long by the clock it moves."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def block_s(self) -> float:
        self.clock[0] += self.seconds
        return self.seconds


def plan(**how) -> Plan:
    return Plan.fixed(8, num_ranks=2, zero_stage=0, **how)


@pytest.mark.parametrize(
    ("arms", "seconds", "laps"),
    [
        (("plan", "usual", "control"), 0.25, 9),
        (("plan", "usual", "control"), 3.0, 6),  # of 9 s each
        (("plan", "usual", "control"), 30.0, 5),  # as few as a verdict takes
        (("plan",), 0.25, 5),
        (("plan",), 100.0, 1),
    ],
)
@pytest.mark.parametrize("reopens", [False, True])
def test_pairs_are_never_fewer_than_a_verdict_takes(monkeypatch, arms, seconds, laps, reopens):
    clock = [0.0]
    monkeypatch.setattr(dry_run.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: clock[0])
    found = dry_run.DryRuns(lambda: None)
    monkeypatch.setattr(found, "_running", lambda plan: contextlib.nullcontext(Runs(clock, seconds)))
    plans = {"plan": plan(reduce_dtype="bf16")} | dict.fromkeys(arms[1:], plan())
    block_s = found._laps({name: plans[name] for name in arms}, reopens=reopens)
    assert {name: len(taken) for name, taken in block_s.items()} == dict.fromkeys(arms, laps)


class Counting(torch.optim.SGD):
    """With things of its own, which torch does not copy."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls, self.average = 0, torch.zeros(2)

    def step(self, closure=None):
        self.calls += 1
        self.average += 1
        return super().step(closure)


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = Counting(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_step_of_the_copies_is_a_step_of_the_originals_and_moves_them_alone():
    model, optimizer = loop()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # stands between a loop and its optimizer's step
    before = [p.detach().clone() for p in model.parameters()]
    own, its = copied_together(model, optimizer)
    assert own[0].weight is own[2].weight
    assert [id(p) for group in its.param_groups for p in group["params"]] == [id(p) for p in own.parameters()]
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    its.step()
    assert (its.calls, optimizer.calls) == (2, 1)
    assert optimizer.average.tolist() == [1, 1]
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not any(torch.equal(p, was) for p, was in zip(own.parameters(), before, strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))
