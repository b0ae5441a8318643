"""A loop that no plan can improve is left alone: the loop of `benchmarks/micro/planted.py`, smaller."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.measure import machine
from trimtab.plans.plan import Plan

ROWS, WIDTH, CLASSES = 32, 256, 10


@pytest.fixture(autouse=True)
def only_fp32(monkeypatch):
    """A machine on which no other precision is worth a try: on some the loop's own would not be the fastest."""
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def planned(seed: int) -> Plan:
    """Return the plan, measured in earnest, of a fresh loop: its optimizer fused, its batch so small that cuts cost."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    return trimtab.plan(model, optimizer, mean_loss, batch, reference=trimtab.Reference("fp32"))


def test_the_plan_of_an_optimal_loop_changes_nothing():
    plan = planned(0)
    if plan.changes:
        # The clock is a real machine's, whose noise may make a gain now and then, and must not end a build: once more.
        # How often it does is for the benchmark to count, and for test_false_gains.py, whose clock is made up.
        plan = planned(1)
    assert (plan.changes, plan.plan_kind) == ((), "equivalent"), plan.explain()
    assert plan.explain().startswith("Change nothing")
    assert plan.micro_batch.rejected, "nothing was tried against it"
