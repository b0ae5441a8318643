"""Planning beside other processes says so, and leaves the threads as they were."""

from __future__ import annotations

import pytest
import torch
from small_loops import sgd, square_loss
from torch import nn

import trimtab
from trimtab.measure import timing


@pytest.mark.usefixtures("brief_trials")
def test_a_plan_on_a_loaded_machine_names_the_clock(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = nn.Linear(4, 4)
        for share, codes in ((0.5, {"timing.processor_time"}), (1.0, set())):
            monkeypatch.setattr(timing, "processor_fraction", lambda num_threads, share=share: share)
            plan = trimtab.plan(model, sgd(model), square_loss, torch.randn(8, 4), num_blocks=3)
            assert {note.code for note in plan.notes if note.code.startswith("timing")} == codes
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("brief_trials")
def test_planning_begins_anew_when_the_machine_becomes_loaded(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    shares = iter([1.0] * 4)
    monkeypatch.setattr(timing, "processor_fraction", lambda num_threads: next(shares, 0.5))
    try:
        model, seen = nn.Linear(4, 4), []
        weights = [each.clone() for each in model.parameters()]
        plan = trimtab.plan(model, sgd(model), square_loss, torch.randn(8, 4), num_blocks=3, progress=seen.append)
        assert [note.code for note in plan.notes if note.code.startswith("timing")] == ["timing.processor_time"]
        assert sum("measuring again" in line for line in seen) == 1
        assert torch.get_num_threads() == 2
        assert not timing.is_timed_by_processor()
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    finally:
        torch.set_num_threads(before)
