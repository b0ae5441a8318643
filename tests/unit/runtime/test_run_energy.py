"""Joules in a run's record: from window to window, evaluations left out, or why there are none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.energy import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import Header, RecordWriter, read_record
from trimtab.measure.energy import EnergyClock, GivenWatts, NoMeter
from trimtab.runtime.recorder import Recorder, Step


@pytest.fixture
def world(tmp_path):
    """A recorder, a clock, and a meter of 50 W."""
    world = SimpleNamespace(now=10.0, extra=0.0, path=tmp_path / "run.jsonl")
    meter = SimpleNamespace(provenance=Provenance.MEASURED, sources=("a meter",), period_s=math.inf)
    meter.joules = lambda: 50.0 * world.now + world.extra
    world.clock = EnergyClock(meter, clock=lambda: world.now)
    with RecordWriter(world.path, Header("run")) as writer:
        world.recorder = Recorder(writer, world.clock)
        yield world


def steps(world, seconds: float, step_s: float = 0.25) -> None:
    for _ in range(round(seconds / step_s)):
        world.now += step_s
        world.recorder.step(Step(8, 1, 8, 0.5, 0.1, True))


def lines(world) -> tuple[list[tuple], dict]:
    """Return what the record's lines say of joules, and its last one."""
    world.recorder.close()
    found = read_record(world.path)
    said = [event.detail for event in found.events if event.name == "energy"]
    return [(each["energy_s"], each["energy_j"], each["energy"]) for each in said], found.end.detail


def test_a_line_is_said_every_ten_seconds_and_the_total_is_of_all(world):
    steps(world, 25.0)
    said, end = lines(world)
    assert said == [(10.0, 500.0, "measured")] * 2
    assert (end["energy_j"], end["energy_s"]) == (1250.0, 25.0)


def test_an_evaluation_is_in_no_joule(world):
    steps(world, 8.0)
    world.now, world.extra = world.now + 4.0, 1e6  # which draws a lot
    world.recorder.evaluation(8, "accuracy", 0.5)
    steps(world, 6.0)
    said, end = lines(world)
    assert (end["energy_j"], end["energy_s"]) == (700.0, 14.0)
    assert said == []


def test_who_gave_the_clock_reads_what_the_record_says(world):
    steps(world, 5.0)
    before = world.clock.read()
    world.recorder.evaluation(8, "accuracy", 0.5)
    _, end = lines(world)
    world.now, world.extra = world.now + 60.0, 1e6
    assert (before.joules, world.clock.read().joules, end["energy_j"]) == (250.0, 250.0, 250.0)


def test_a_run_that_is_too_short_for_a_meter_has_no_joules(world):
    steps(world, 0.75)
    _, end = lines(world)
    assert end["energy_j"] is None
    assert "less than 1 s" in end["energy_reason"]


def loop(record, meter, num_steps: int = 3):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    clock = None if meter is None else EnergyClock(meter)
    with (
        RecordWriter(record, Header("run")) as writer,
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), record=writer, energy=clock) as run,
    ):
        for window in run.windows([batch] * num_steps):
            run.train_step(window, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]))
    return read_record(record)


@pytest.mark.parametrize(("record", "energy"), [(False, EnergyClock(GivenWatts(5))), (True, GivenWatts(5))])
def test_a_clock_without_a_record_and_what_is_no_clock_are_refused(tmp_path, record, energy):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        RecordWriter(tmp_path / "run.jsonl", Header("run")) as writer,
        pytest.raises(ValueGivenError, match="energy"),
    ):
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8), record=writer if record else None, energy=energy)


def test_a_record_ends_with_what_the_run_took(tmp_path):
    end = loop(tmp_path / "run.jsonl", GivenWatts(100)).end
    assert end.detail["energy"] == "estimated"
    assert end.detail["energy_j"] == pytest.approx(100 * end.detail["energy_s"], rel=0.01)


def test_a_record_without_a_meter_says_nothing_or_why(tmp_path):
    assert loop(tmp_path / "a.jsonl", None).end.detail == {}
    end = loop(tmp_path / "b.jsonl", NoMeter("there is none")).end
    assert (end.detail["energy_j"], end.detail["energy"]) == (None, "absent")
    assert end.detail["energy_reason"] == "there is none"
