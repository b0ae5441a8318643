"""The fp16 loss scale: read off the device once a window, and right after all that changes it."""

from __future__ import annotations

import math

import pytest
import torch
from small_loops import linear_loop

import trimtab
from trimtab.plans.plan import Plan

ROWS = 4
FIRST = 2.0**16
FP16 = Plan.fixed(ROWS, 2, precision="fp16")


def batch():
    return torch.linspace(-1, 1, 3 * ROWS).reshape(ROWS, 3)


def calm(model, batch):
    return 0.01 * model(batch).float().square().mean()


def overflowing(model, batch):
    """A number, whose gradient is beyond fp16."""
    return 1e30 * calm(model, batch)


def no_number(model, batch):
    return math.nan * calm(model, batch)


def scale_of(run):
    """Return the loss scale, which is to be the scaler's own."""
    assert run.loss_scale == run._precision._scaler.get_scale()
    return run.loss_scale


@pytest.fixture
def reads(monkeypatch):
    """Collect the scales that are read."""
    found, read = [], torch.amp.GradScaler.get_scale

    def noting(self):
        found.append(read(self))
        return found[-1]

    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", noting)
    return found


def test_it_is_read_once_a_window_however_often_it_is_asked_for(reads):
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        assert run.loss_scale == FIRST
        reads.clear()
        for loss_fn, after in ((calm, FIRST), (calm, FIRST), (overflowing, FIRST / 2), (calm, FIRST / 2)):
            run.train_step(run.window(batch()), loss_fn)
            assert [run.loss_scale, run.loss_scale] == [after, after]
        assert reads == [FIRST, FIRST, FIRST / 2, FIRST / 2]
        assert run.applied_steps == 3


def test_a_record_reads_it_no_more(reads, tmp_path):
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with (
        trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer,
        trimtab.start(model, optimizer, FP16, record=writer) as run,
    ):
        run.train_step(run.window(batch()), calm)
        reads.clear()
        for loss_fn in (calm, overflowing, calm):
            run.train_step(run.window(batch()), loss_fn)
        assert len(reads) == 3
    scales = [step.loss_scale for step in trimtab.read_record(tmp_path / "run.jsonl").steps]
    assert scales == [FIRST, FIRST, FIRST / 2, FIRST / 2]


def test_it_follows_overflows_and_is_none_once_fp16_is_left():
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        found = []
        for loss_fn in (calm, overflowing, overflowing, no_number, calm, overflowing):
            run.train_step(run.window(batch()), loss_fn)
            found.append(scale_of(run))
    assert found == [FIRST, FIRST / 2, FIRST / 4, FIRST / 4, FIRST / 4, FIRST / 8]
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        run.train_step(run.window(batch()), calm)
        assert scale_of(run) == FIRST
        state = run.state_dict()
        run.load_state_dict(state | {"precision": {"name": "fp32", "scaler": None}})
        assert run.loss_scale is None
        run.train_step(run.window(batch()), calm)
        assert (run.loss_scale, run.applied_steps) == (None, 2)


@pytest.mark.parametrize("asked", [True, False])
def test_a_first_window_that_is_no_number_leaves_it_as_it_was(asked):
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        assert not asked or scale_of(run) == FIRST
        run.train_step(run.window(batch()), no_number)
        assert scale_of(run) == FIRST


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_it_is_that_of_a_state_that_is_loaded(asked, trained):
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        for _ in range(3):
            run.train_step(run.window(batch()), overflowing)
        saved = run.state_dict()
    with trimtab.start(model, optimizer, FP16) as run:
        if trained:
            run.train_step(run.window(batch()), calm)
        assert not asked or scale_of(run) == FIRST
        run.load_state_dict(saved)
        assert scale_of(run) == FIRST / 8
        run.train_step(run.window(batch()), overflowing)
        assert scale_of(run) == FIRST / 16
        assert run.applied_steps == 0


def test_it_stays_where_a_window_is_given_up_after_it_was_unscaled():
    model, optimizer = linear_loop(3, 2, lr=0.01)
    with trimtab.start(model, optimizer, FP16) as run:
        run.train_step(run.window(batch()), overflowing)
        for micro in run.window(batch()):
            with run.autocast():
                loss = calm(run.model, micro)
            run.backward(loss)
        run.unscale()
        run.discard()
        assert scale_of(run) == FIRST / 2
        run.train_step(run.window(batch()), overflowing)
        assert scale_of(run) == FIRST / 4
