"""The record of a run: a line per window, evaluations left out of its energy, and the file left to its owner."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from small_loops import linear_loop, sgd, train
from small_loops import square_loss as mean_loss
from torch import nn

import trimtab
from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import End, Header, RecordWriter, read_record
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, MeterLost, NoMeter
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training.step_recorder import StepRecorder


def sum_loss(model, batch):
    squares = model(batch).square()
    return Summed(squares.sum(), torch.tensor(squares.numel()))


def record(path, plan, num_windows, loss_fn=mean_loss, rows=4, **start):
    model, optimizer = linear_loop(3, 2)
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
    for loss_fn, terms in ((mean_loss, 4), (sum_loss, 8)):
        found, losses = record(tmp_path / f"{terms}.jsonl", Plan.fixed(4, 3), num_windows, loss_fn)
        assert [step.index for step in found.steps] == list(range(num_windows))
        assert [step.loss for step in found.steps] == losses
        assert all((step.samples, step.terms, step.applied) == (4, terms, True) for step in found.steps)
        assert all(step.wall_s > 0 and step.grad_norm is None and step.loss_scale is None for step in found.steps)


def test_the_rate_is_the_one_applied_and_the_norm_the_one_before_clipping(tmp_path):
    plan = Plan.fixed(4, schedule="warmup_cosine", learning_rate_scale=2.0)
    found, _ = record(tmp_path / "r.jsonl", plan, 2, total_samples=8, clip_norm=1e-3)
    half = 0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * 0.45 / 0.95, dtype=torch.float64)).item())
    assert [step.learning_rate for step in found.steps] == pytest.approx([0.2 * half, 0.02])
    assert all(step.grad_norm > 1e-2 for step in found.steps)


def test_windows_with_non_finite_losses_or_gradients_are_recorded(tmp_path):
    def large(model, batch):  # a number, whose gradient overflows
        return mean_loss(lambda x: model(x).float(), batch) * 1e30

    found, _ = record(tmp_path / "r.jsonl", Plan.fixed(4, precision="fp16"), 2, large)
    assert [(step.applied, step.samples, step.loss_scale) for step in found.steps] == [
        (False, 4, 2.0**15),
        (False, 4, 2.0**14),
    ]
    with pytest.warns(RuntimeWarning, match="non-finite"):
        found, _ = record(tmp_path / "n.jsonl", Plan.fixed(4), 1, lambda model, x: mean_loss(model, x) * float("nan"))
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
    run = trimtab.start(*linear_loop(3, 2), Plan.fixed(4), record=writer)
    run.train_step(run.window(torch.randn(4, 3)), mean_loss)
    run.close()
    writer.write(End("completed"))
    writer.close()
    run.close()
    assert read_record(path).end is not None


@pytest.mark.parametrize("given", ["r.jsonl", 3, [], object()], ids=lambda v: type(v).__name__)
def test_what_is_no_writer_is_refused_at_the_door(given):
    with raises(ValueGivenError, code="record.not_writer", field="record"):
        trimtab.start(*linear_loop(3, 2), Plan.fixed(4), record=given)


@pytest.fixture
def world(tmp_path):
    """A clock, a meter of 50 W that is lost when that is said, and a record that is written by them."""
    world = SimpleNamespace(now=10.0, lost="", reads=0, extra=0.0)

    def joules() -> float:
        world.reads += 1
        if world.lost:
            raise MeterLost(world.lost)
        return 50.0 * world.now + world.extra

    world.meter = SimpleNamespace(
        provenance=Provenance.MEASURED, sources=("a meter",), period_s=math.inf, joules=joules
    )
    world.energy = EnergyClock(world.meter, clock=lambda: world.now)
    world.path = tmp_path / "run.jsonl"
    with RecordWriter(world.path, Header("run")) as writer:
        world.writer, world.recorder = writer, StepRecorder(writer, world.energy)
        yield world


def steps(world, seconds: float, step_s: float = 0.25) -> None:
    for _ in range(round(seconds / step_s)):
        world.now += step_s
        world.recorder.step(samples=8, terms=8, loss=0.5, learning_rate=0.1)


def ended(world):
    """Return what the record says of joules: by line, and in the end."""
    world.recorder.close()
    record = read_record(world.path)
    return [event.detail for event in record.events if event.name == "energy"], record.end.detail


def test_a_line_is_said_every_ten_seconds_and_the_total_is_of_all(world):
    steps(world, 25.0)
    said, end = ended(world)
    assert [(each["energy_s"], each["energy_j"], each["energy"]) for each in said] == [(10.0, 500.0, "measured")] * 2
    assert (end["energy_j"], end["energy_s"]) == (1250.0, 25.0)


def test_the_meter_is_read_no_more_than_four_times_a_second(world):
    before = world.reads
    steps(world, 20.0, step_s=0.01)
    assert 60 <= world.reads - before <= 80


def test_a_run_that_is_evaluated_every_few_seconds_has_a_total(world):
    for _ in range(5):
        steps(world, 3.3, step_s=0.11)
        world.now += 1.0
        world.recorder.evaluation(64, "accuracy", 0.5)
    _, end = ended(world)
    assert end["energy_s"] == pytest.approx(16.5, rel=0.1)
    assert end["energy_j"] == pytest.approx(50 * end["energy_s"])


def test_an_evaluation_is_in_no_joule(world):
    steps(world, 8.0)
    world.now, world.extra = world.now + 4.0, 1e6  # which draws a lot
    world.recorder.evaluation(64, "accuracy", 0.5)
    steps(world, 6.0)
    _, end = ended(world)
    assert (end["energy_j"], end["energy_s"]) == (700.0, 14.0)


def test_what_is_too_short_for_a_meter_is_absent_and_not_zero(world):
    steps(world, 0.75)
    _, end = ended(world)
    assert (end["energy_j"], end["energy"]) == (None, "absent")
    assert "less than 1 s" in end["energy_reason"]


def test_a_short_rest_is_in_neither_joules_nor_seconds(world):
    steps(world, 20.0)
    world.recorder.evaluation(64, "accuracy", 0.5)
    steps(world, 0.5)
    _, end = ended(world)
    assert (end["energy_j"], end["energy_s"]) == (1000.0, 20.0)


@pytest.mark.parametrize("lost", ["the GPU is lost", ""])
def test_a_meter_that_is_lost_makes_the_total_unknown(world, lost):
    steps(world, 3.0)
    world.lost = lost
    joules, world.meter.joules = world.meter.joules, world.meter.joules if lost else lambda: 1 / 0
    steps(world, 3.0)
    world.lost, world.meter.joules = "", joules
    steps(world, 3.0)
    _, end = ended(world)
    assert end["energy_j"] is None
    assert (lost or "ZeroDivisionError") in end["energy_reason"]


def test_who_gave_the_clock_reads_what_the_record_says(world):
    steps(world, 5.0)
    before = world.energy.read()
    world.recorder.evaluation(8, "accuracy", 0.5)
    _, end = ended(world)
    world.now, world.extra = world.now + 60.0, 1e6
    assert (before.joules, world.energy.read().joules, end["energy_j"]) == (250.0, 250.0, 250.0)


def test_a_run_that_is_gone_on_with_says_from_where_its_joules_are(world):
    steps(world, 5.0)
    state = world.recorder.state_dict()
    assert state["index"] == 20
    world.writer.close()  # a record has one writer at a time
    with RecordWriter(world.path, Header("run"), continues=True) as writer:
        own = EnergyClock(world.meter, clock=lambda: world.now)
        world.recorder = StepRecorder(writer, own)
        world.now, world.extra = world.now + 30.0, 1e6  # reading a checkpoint is no training
        world.recorder.loading(state)()
        steps(world, 4.0)
        _, end = ended(world)
    assert (end["energy_j"], end["energy_s"], end["energy_from_step"]) == (200.0, 4.0, 20)


def test_what_is_no_clock_is_refused(tmp_path):
    with (
        RecordWriter(tmp_path / "a.jsonl", Header("run")) as writer,
        raises(ValueGivenError, code="energy.not_clock", field="energy"),
    ):
        StepRecorder(writer, GivenWatts(5))
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    with raises(ValueGivenError, code="energy.no_record", field="energy"):
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), energy=EnergyClock(GivenWatts(5)))


def metered_record(record, meter, num_steps: int = 3):
    energy = None if meter is None else EnergyClock(meter)
    model, optimizer = linear_loop(4, 3)
    batch = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    with (
        RecordWriter(record, Header("run")) as writer,
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), record=writer, energy=energy) as run,
    ):
        train(run, [batch] * num_steps, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]))
    return read_record(record)


def test_a_record_ends_with_what_the_run_took(tmp_path):
    end = metered_record(tmp_path / "run.jsonl", GivenWatts(100)).end
    assert end.detail["energy"] == "estimated"
    assert end.detail["energy_j"] == pytest.approx(100 * end.detail["energy_s"], rel=0.01)
    assert metered_record(tmp_path / "a.jsonl", None).end.detail == {}
    end = metered_record(tmp_path / "b.jsonl", NoMeter("there is none")).end
    assert (end.detail["energy_j"], end.detail["energy"]) == (None, "absent")
    assert end.detail["energy_reason"] == "there is none"
