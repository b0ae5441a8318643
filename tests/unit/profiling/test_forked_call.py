"""What would end the process is found out in another one."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch
from small_loops import sgd
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.plans.profile import Candidate
from trimtab.profiling import smoke_test
from trimtab.profiling.smoke_test import DONE, LATE, RAISED, can_fork, end_of
from trimtab.profiling.training_loop import TrainingLoop

pytestmark = pytest.mark.skipif(not can_fork(), reason="a process cannot be split off here")


def raises():
    raise RuntimeError("it said so")


def backward():
    torch.randn(64, 64, requires_grad=True).matmul(torch.randn(64, 64)).sum().backward()


def backward_and_abort():
    backward()
    os.abort()


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (os.abort, "SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (backward_and_abort, "SIGABRT"),
        (raises, RAISED),
        (lambda: sys.exit(0), RAISED),
        (lambda: None, DONE),
        (backward, DONE),
    ],
)
def test_how_it_ended_is_told(function, end):
    assert end_of(function) == end


def test_a_call_that_is_late_or_cannot_be_forked_is_not_waited_for(monkeypatch):
    forked, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(fork()) or forked[-1])
    start = time.monotonic()
    assert end_of(lambda: time.sleep(60), patience_s=0.05) == LATE
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)

    def refused():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refused)
    assert end_of(os.abort) == LATE


@pytest.mark.parametrize(("of_incumbent", "calls"), [(DONE, 3), ("SIGKILL", 1), (RAISED, 1), (LATE, 1)])
def test_where_the_incumbents_own_rows_do_not_come_to_their_end_nothing_is_told_of_others(
    monkeypatch, of_incumbent, calls
):
    ends = [of_incumbent, "SIGSEGV", LATE]
    seen = []
    monkeypatch.setattr(smoke_test, "end_of", lambda function: seen.append(1) or ends[len(seen) - 1])
    model = nn.Linear(4, 1)
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b).mean(), torch.randn(8, 4))
    candidates = [Candidate(8, precision=precision) for precision in ("bf16", "fp16", "tf32")]
    guard = smoke_test.CrashTest(subject, Candidate(8))
    said = [guard.refusal(each) for each in candidates]  # after a late one nobody is waited for any more
    assert [each and each.code for each in said] == ["trial.crashed" if of_incumbent == DONE else None, None, None]
    assert all("SIGSEGV" in each.text for each in said if each)
    alike = [replace(each, micro_batch=4, fused_optimizer=True, allocator="retain") for each in candidates]
    assert [guard.refusal(each) for each in alike] == said  # the same kernels: what was told is told again
    assert len(seen) == calls


def test_a_batch_that_cannot_be_split_goes_whole():
    @dataclass
    class Batch:
        rows: torch.Tensor
        number = None

    batch = Batch(torch.randn(8, 4))
    batch.number = torch.tensor(8)
    model = nn.Linear(4, 1)
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b.rows).mean(), batch)
    assert smoke_test.CrashTest(subject, Candidate(8))._few.rows == 8


def test_what_it_changes_and_says_is_its_own(capfd):
    kept = torch.zeros(3)

    def write():
        kept.add_(1)
        sys.stdout.write("said")
        sys.stdout.flush()
        os.write(1, b"said")

    assert end_of(write) == DONE
    assert kept.sum() == 0
    assert "said" not in capfd.readouterr().out


@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize("budget", [None, trimtab.Budget(memory="1GiB")], ids=["free", "limited"])
def test_settings_that_end_a_process_are_a_loser_with_its_reason(budget):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = sgd(model)

    def loss(model, batch):
        if torch.is_autocast_enabled("cpu"):
            os.abort()
        return model(batch).square().mean()

    batch = torch.randn(8, 4)
    before = fingerprint(model, optimizer)
    found = trimtab.profile(model, optimizer, loss, batch, budget=budget, num_blocks=3)
    errors = {t.candidate.precision: t.error for t in found.stage("modes") if t.error}
    assert set(errors) <= {"bf16", "fp16"}
    for error in errors.values():
        assert "SIGABRT" in error or "not tried" in error
    assert errors or not any(t.candidate.precision != "fp32" for t in found.trials)
    assert fingerprint(model, optimizer) == before
