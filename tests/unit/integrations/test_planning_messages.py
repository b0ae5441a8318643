"""Log lines of trainers on planning."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import trimtab
from trimtab.core.choice import MeasuredCost
from trimtab.integrations import planning_messages
from trimtab.integrations.planning_messages import EVERY_S, LONGEST, ProgressLines, announced, headline


def cost(step_s: float) -> MeasuredCost:
    return MeasuredCost(step_s, None)


@pytest.mark.parametrize(
    ("values", "facts", "line"),
    [
        ({}, {}, "trimtab: no change is significantly better; planned in 12.3 s"),
        (
            {"precision": "bf16", "fused_optimizer": True},
            {"verified": (1.5, 1.7)},
            "trimtab: bf16, fused AdamW; 1.6x in trials; planned in 12.3 s",
        ),
        (
            {"recompute": "every_block"},
            {"baseline": cost(2.0), "predicted": cost(2.5)},
            "trimtab: activation checkpointing; 0.8x predicted; planned in 12.3 s",
        ),
    ],
)
def test_the_result_of_planning_is_in_words(values, facts, line):
    plan = trimtab.Plan.fixed(8, **values).having(**facts)
    assert headline(plan, "AdamW", 12.34) == line


def test_a_long_result_is_shortened():
    values = {"precision": "bf16", "memory_layout": "channels_last", "fused_optimizer": True, "loss_chunk": 512}
    plan = trimtab.Plan.fixed(8, 2, allocator="retain", recompute="every_block", **values).having(verified=(1.5, 1.7))
    line = headline(plan, "AnOptimizerOfALongName", 7200.0)
    assert len(line) <= LONGEST
    assert "micro-batch 2, bf16, channels last" in line
    assert " more; 1.6x in trials; planned in 2.00 h" in line


def test_progress_is_logged_every_ten_seconds(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(planning_messages.time, "monotonic", lambda: now[0])
    progress = ProgressLines()
    for second in range(35):
        now[0] = 100.0 + second
        progress(f"block {second}")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("; ")[2] for line in lines] == ["block 10", "block 20", "block 30"]
    assert EVERY_S == 10


@pytest.mark.parametrize("speaks", [True, False])
def test_the_first_rank_alone_logs(caplog, speaks):
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    plan = trimtab.Plan.fixed(8)
    found, seconds = announced(lambda progress: plan, optimizer, speaks=speaks)
    assert found is plan
    assert seconds >= 0
    assert len(caplog.records) == speaks


def test_lines_appear_on_stderr_without_handlers(monkeypatch, capsys):
    logger = logging.getLogger("trimtab.test")
    logger.propagate = False
    monkeypatch.setattr(planning_messages, "LOGGER", logger)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    announced(lambda progress: trimtab.Plan.fixed(8), optimizer)
    captured = capsys.readouterr()
    assert captured.err.startswith("trimtab: no change")
    assert captured.err.count("\n") == 1
    assert not captured.out
    logger.setLevel(logging.WARNING)
    announced(lambda progress: trimtab.Plan.fixed(8), optimizer)
    assert not capsys.readouterr().err


def test_a_plan_by_hand_keeps_the_trainers_precision():
    from trimtab.integrations.trainer_rules import following

    kept = following(trimtab.Plan.fixed(8), "bf16")
    assert (kept.precision.value, kept.reference.precision, kept.changes) == ("bf16", "bf16", ())
    chosen = trimtab.Plan.fixed(8, precision="fp32")
    assert following(chosen, "bf16") is chosen
    measured = dataclasses.replace(trimtab.Plan.fixed(8), baseline=cost(1.0))
    assert following(measured, "bf16") is measured
    assert following(None, "bf16") is None
