"""What would end the process is found out in another one."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import nn

import trimtab
from trimtab.calibrate.child import can_fork, killed_by
from trimtab.measure.snapshot import fingerprint

pytestmark = pytest.mark.skipif(not can_fork(), reason="a process cannot be split off here")


def raises():
    raise RuntimeError("it said so")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.abort, "SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (raises, None),
        (lambda: None, None),
        (lambda: torch.randn(64, 64, requires_grad=True).matmul(torch.randn(64, 64)).sum().backward(), None),
    ],
)
def test_the_signal_that_ended_it_is_told(function, name):
    assert killed_by(function) == name


def test_who_takes_too_long_is_not_waited_for():
    start = time.monotonic()
    assert killed_by(lambda: time.sleep(60), patience_s=0.05) is None
    assert time.monotonic() - start < 30
    with pytest.raises(ChildProcessError):  # nobody is left
        os.waitpid(-1, os.WNOHANG)


def test_what_it_changes_and_says_is_its_own(capfd):
    kept = torch.zeros(3)

    def write():
        kept.add_(1)
        sys.stdout.write("said")
        sys.stdout.flush()
        os.write(1, b"said")

    killed_by(write)
    assert kept.sum() == 0
    assert "said" not in capfd.readouterr().out


def test_settings_that_end_a_process_are_a_loser_with_its_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        if torch.is_autocast_enabled("cpu"):
            os.abort()
        return model(batch).square().mean()

    batch = torch.randn(8, 4)
    before = fingerprint(model, optimizer)
    found = trimtab.profile(model, optimizer, loss, batch, num_blocks=3)
    errors = {t.candidate.precision: t.error for t in found.stage("modes") if t.error}
    assert set(errors) <= {"bf16", "fp16"}
    for error in errors.values():
        assert error.startswith("SIGABRT ended a process") or "not tried" in error
    assert errors or not any(t.candidate.precision != "fp32" for t in found.trials)
    assert fingerprint(model, optimizer) == before
