"""Joules in a run's record: from window to window, evaluations left out, or why there are none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import Header, RecordWriter, read_record
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, MeterLost, NoMeter
from trimtab.training.step_recorder import PendingStep, StepRecorder


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
        world.recorder.step(PendingStep(8, 1, 8, 0.5, 0.1, True))


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


def test_a_meter_that_is_lost_makes_the_total_unknown(world):
    steps(world, 3.0)
    world.lost = "the GPU is lost"
    steps(world, 3.0)
    world.lost = ""
    steps(world, 3.0)
    _, end = ended(world)
    assert (end["energy_j"], end["energy_reason"]) == (None, "the GPU is lost")


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


def test_what_a_meter_raises_ends_no_run(world):
    world.meter.joules = lambda: 1 / 0
    steps(world, 3.0)
    _, end = ended(world)
    assert "ZeroDivisionError" in end["energy_reason"]


def loop(record, meter, num_steps: int = 3):
    energy = None if meter is None else EnergyClock(meter)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    with (
        RecordWriter(record, Header("run")) as writer,
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), record=writer, energy=energy) as run,
    ):
        for window in run.windows([batch] * num_steps):
            run.train_step(window, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]))
    return read_record(record)


def test_joules_without_a_record_are_refused():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ValueGivenError, code="energy.no_record", field="energy"):
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), energy=EnergyClock(GivenWatts(5)))


def test_a_record_ends_with_what_the_run_took(tmp_path):
    end = loop(tmp_path / "run.jsonl", GivenWatts(100)).end
    assert end.detail["energy"] == "estimated"
    assert end.detail["energy_j"] == pytest.approx(100 * end.detail["energy_s"], rel=0.01)


def test_a_record_without_a_meter_says_nothing_or_why(tmp_path):
    assert loop(tmp_path / "a.jsonl", None).end.detail == {}
    end = loop(tmp_path / "b.jsonl", NoMeter("there is none")).end
    assert (end.detail["energy_j"], end.detail["energy"]) == (None, "absent")
    assert end.detail["energy_reason"] == "there is none"
