"""A few rows are stepped through before a whole step is risked: a hopeless candidate never runs one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from call_counts import OutOfReach
from small_loops import sgd
from state_digest import fingerprint
from torch import nn

from trimtab.planner.search import SearchPhase
from trimtab.plans.profile import Candidate
from trimtab.profiling import smoke_test, trials
from trimtab.profiling.training_loop import TrainingLoop

ROWS = 128
FP32 = Candidate(ROWS)
BF16 = replace(FP32, precision="bf16")


class Loop:
    """A model whose steps of a few rows take the seconds of a table, and what of them was run.

    Both are where no reference of the loss leads: planning does not restore them.
    """

    def __init__(self, monkeypatch, rows=ROWS):
        self._kept = OutOfReach(few_s={"fp32": [0.01], "bf16": []}, ran=[])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
        self.subject = TrainingLoop(
            model, sgd(model), self.loss, (torch.randn(rows, 1, 4, 4), torch.zeros(rows).long())
        )
        monkeypatch.setattr(smoke_test, "time_call", self.time_call)
        monkeypatch.setattr(trials, "time_call", lambda step, device, count=1: (step(), 1.0)[1])

    @property
    def few_s(self):
        return self._kept.held.few_s

    @property
    def ran(self):
        return self._kept.held.ran

    def loss(self, model, batch):
        self.ran.append(("bf16" if torch.is_autocast_enabled("cpu") else "fp32", len(batch[0])))
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    def time_call(self, step, device):
        step()
        return self.few_s[self.ran[-1][0]].pop(0)

    def stage(self, *candidates, name="modes"):
        return trials.run_stage(self.subject, SearchPhase(name, candidates), 5, lambda text: None)

    def rows_of(self, precision):
        return {rows for ran, rows in self.ran if ran == precision}


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_a_hopeless_candidate_never_runs_a_whole_step(loop):
    loop.few_s["bf16"] = [1.6, 1.7, 1.5]
    before = fingerprint(loop.subject.model, loop.subject.optimizer)
    incumbent, rival = loop.stage(FP32, BF16)
    assert rival.code == "trial.too_slow"
    assert all(figure in rival.error for figure in ("4 of 128 samples", "1.5 s", "10 ms"))
    assert (rival.block_s, rival.peak_bytes) == ((), None)
    assert loop.rows_of("bf16") == {4}
    assert incumbent.error is None
    assert fingerprint(loop.subject.model, loop.subject.optimizer) == before


@pytest.mark.parametrize("few_s", [[0.02], [0.1], [9.0, 0.03], [9.0, 9.0, 0.03]])
def test_a_first_step_of_few_rows_may_hold_what_happens_once(loop, few_s):
    loop.few_s["bf16"] = few_s
    _, rival = loop.stage(FP32, BF16)
    assert rival.error is None
    assert loop.few_s["bf16"] == []
    assert loop.rows_of("bf16") == {4, ROWS}


def test_short_steps_are_tried_whole(loop, monkeypatch):
    monkeypatch.setattr(trials, "time_call", lambda step, device, count=1: (step(), 0.05)[1])
    _, rival = loop.stage(FP32, BF16)
    assert rival.error is None
    assert loop.rows_of("fp32") == loop.rows_of("bf16") == {ROWS}


def test_a_model_of_one_batch_size_is_tried_whole(loop):
    loss = loop.subject.loss_fn

    def fixed(model, batch):
        if len(batch[0]) != ROWS:
            raise RuntimeError("this model takes 128 rows")
        return loss(model, batch)

    loop.subject = replace(loop.subject, loss_fn=fixed)
    _, rival = loop.stage(FP32, BF16)
    assert rival.error is None
    assert loop.rows_of("bf16") == {ROWS}


def test_a_batch_of_few_rows_is_its_own_probe(monkeypatch):
    loop = Loop(monkeypatch, rows=2)
    _, rival = loop.stage(replace(FP32, micro_batch=2), replace(BF16, micro_batch=2))
    assert rival.error is None
    assert loop.few_s["fp32"] == [0.01]


def test_only_precisions_and_layouts_are_probed(loop):
    _, rival = loop.stage(FP32, replace(FP32, micro_batch=64), name="sizes")
    assert rival.error is None
    assert loop.few_s["fp32"] == [0.01]
