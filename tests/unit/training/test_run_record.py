"""A run writes one line per window to the record it was given, and leaves the file to its owner."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import End, Header, RecordWriter, read_record
from trimtab.losses import Summed
from trimtab.plans.plan import Plan


def loop():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mean_loss(model, batch):
    return model(batch).square().mean()


def sum_loss(model, batch):
    squares = model(batch).square()
    return Summed(squares.sum(), torch.tensor(squares.numel()))


def record(path, plan, num_windows, loss_fn=mean_loss, rows=4, **start):
    model, optimizer = loop()
    losses = []
    with (
        RecordWriter(path, Header("a run")) as writer,
        trimtab.start(model, optimizer, plan, record=writer, **start) as run,
    ):
        for window in run.windows(torch.randn(rows, 3) for _ in range(num_windows)):
            losses.append(float(run.train_step(window, loss_fn)))
    return read_record(path), losses


@pytest.mark.parametrize("num_windows", [0, 1, 49, 50, 51, 120])
def test_every_window_has_its_line_in_order(tmp_path, num_windows):
    found, losses = record(tmp_path / "r.jsonl", Plan.fixed(4, 3), num_windows)
    assert [step.index for step in found.steps] == list(range(num_windows))
    assert [step.loss for step in found.steps] == losses
    assert all((step.samples, step.terms, step.applied) == (4, 4, True) for step in found.steps)
    assert all(step.wall_s > 0 and step.grad_norm is None and step.loss_scale is None for step in found.steps)


def test_terms_are_the_windows_count(tmp_path):
    found, losses = record(tmp_path / "r.jsonl", Plan.fixed(4, 3), 3, sum_loss)
    assert [(step.samples, step.terms) for step in found.steps] == [(4, 8)] * 3
    assert [step.loss for step in found.steps] == losses


def test_the_rate_is_the_one_applied_and_the_norm_the_one_before_clipping(tmp_path):
    plan = Plan.fixed(4, schedule="warmup_cosine", learning_rate_scale=2.0)
    found, _ = record(tmp_path / "r.jsonl", plan, 2, total_samples=8, clip_norm=1e-3)
    half = 0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * 0.45 / 0.95, dtype=torch.float64)).item())
    assert [step.learning_rate for step in found.steps] == pytest.approx([0.2 * half, 0.02])
    assert all(step.grad_norm > 1e-2 for step in found.steps)


def test_a_voided_window_is_written_as_one(tmp_path):
    def large(model, batch):  # a number, whose gradient overflows
        return mean_loss(lambda x: model(x).float(), batch) * 1e30

    found, _ = record(tmp_path / "r.jsonl", Plan.fixed(4, precision="fp16"), 2, large)
    assert [(step.applied, step.samples, step.loss_scale) for step in found.steps] == [
        (False, 4, 2.0**15),
        (False, 4, 2.0**14),
    ]


def test_a_loss_that_is_no_number_can_be_written_and_read(tmp_path):
    with pytest.warns(RuntimeWarning, match="non-finite"):
        found, _ = record(tmp_path / "r.jsonl", Plan.fixed(4), 1, lambda model, x: mean_loss(model, x) * float("nan"))
    assert found.steps[0].loss != found.steps[0].loss


def test_an_error_still_writes_what_was_done(tmp_path):
    def failing(model, batch):
        if len(done) == 3:
            raise FloatingPointError
        done.append(1)
        return mean_loss(model, batch)

    done = []
    with pytest.raises(FloatingPointError):
        record(tmp_path / "r.jsonl", Plan.fixed(4), 5, failing)
    assert len(read_record(tmp_path / "r.jsonl").steps) == 3


def test_the_file_stays_open_for_its_owner_and_may_be_closed_before_a_second_close(tmp_path):
    path = tmp_path / "r.jsonl"
    writer = RecordWriter(path, Header("a run"))
    run = trimtab.start(*loop(), Plan.fixed(4), record=writer)
    run.train_step(run.window(torch.randn(4, 3)), mean_loss)
    run.close()
    writer.write(End("completed"))
    writer.close()
    run.close()
    assert read_record(path).end is not None


@pytest.mark.parametrize("given", ["r.jsonl", 3, [], object()], ids=lambda v: type(v).__name__)
def test_what_is_no_writer_is_refused_at_the_door(given):
    with raises(ValueGivenError, code="record.not_writer", field="record"):
        trimtab.start(*loop(), Plan.fixed(4), record=given)
