"""A run that waits and pauses is the run that did neither; whatever goes wrong, it goes on, and loses nothing."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from clean_day import HOUR, LEVELS, NOW, STEP_S, STEPS, Day, Hourly
from raising import raises

from trimtab.carbon.services import ConstantIntensity
from trimtab.checkpoint.atomic_directory import committed_folders
from trimtab.core.errors import FormatError
from trimtab.core.record import read_record
from trimtab.experiments.train_command import LowCarbonOptions, train_clean, train_now


@pytest.fixture
def day(monkeypatch):
    return Day(monkeypatch)


@pytest.fixture
def plain(monkeypatch):
    """What the run is without a wait."""
    with monkeypatch.context() as patched:
        found = Day(patched)
        found.figures = train_now(found.training())
    assert len(found.losses) == STEPS
    return found


def same(day: Day, plain: Day) -> None:
    assert day.losses == plain.losses
    assert torch.equal(day.weights, plain.weights)


def hours_trained(day: Day) -> list[int]:
    return sorted({int((at - NOW - STEP_S) // HOUR) for at in day.trained_at})


def test_a_run_that_pauses_is_to_the_bit_the_one_that_does_not(day, plain, tmp_path):
    found = day.train(Hourly(), tmp_path / "kept", record=tmp_path / "run.jsonl")
    same(day, plain)
    assert [found[name] for name in ("loss", "accuracy", "rows", "train_s")] == [
        plain.figures[name] for name in ("loss", "accuracy", "rows", "train_s")
    ]
    assert found["pauses"] == 3
    assert max(day.trained_at) <= NOW + 10 * HOUR
    assert sum(LEVELS[int((at - NOW - 1) // HOUR)] == 100 for at in day.trained_at) >= STEPS - 3  # what a start loses
    record = read_record(tmp_path / "run.jsonl")
    assert [step.index for step in record.steps] == list(range(STEPS))
    assert record.end.reason == "closed"


def test_every_decision_is_in_the_record_with_its_figures(day, tmp_path):
    day.train(Hourly(), tmp_path / "kept", record=tmp_path / "run.jsonl")
    events = read_record(tmp_path / "run.jsonl").events
    names = [event.name for event in events if event.name != "account"]
    assert names == ["when_to_train", *["paused", "resumed", "when_to_train"] * 3]
    first, second = [event for event in events if event.name == "when_to_train"][:2]
    assert first.detail["work"] == "4.00 h: 24 steps of 10 min 0 s (from the given duration of the run)"
    assert first.detail["pause"] == "each pause costs 10 min 0 s (given)"
    assert first.detail["grams"] < first.detail["start_now_g"]
    assert [first.detail["forecast"], first.detail["kind"]] == ["a made-up grid", "average"]
    assert second.step == 6
    assert "18 steps of 10 min 0 s (as measured before the pause)" in second.detail["work"]
    assert second.detail["waited_s"] > HOUR
    assert second.detail["work_s"] == pytest.approx(18 * STEP_S + STEP_S)  # and what a start loses
    assert len(day.told) == 4
    assert day.told[0].startswith("start now, in 4 periods")


def test_nothing_is_held_while_it_waits(day, tmp_path):
    alive, folders = [], []

    def look() -> None:
        alive.append(sum(model() is not None for model in day.models))
        folders.append((tmp_path / "kept" / "run.lock").read_text())

    day.asleep = look
    day.train(Hourly(), tmp_path / "kept")
    assert len(day.models) == 4
    assert set(alive) == {0}
    assert set(folders) == {""}  # nobody holds it


def test_a_run_without_checkpoints_waits_in_one_piece(day, plain):
    found = day.train(Hourly((300, 300, 300, 100, 100, 100, 100, 300)), by_h=8)
    same(day, plain)
    assert hours_trained(day) == [3, 4, 5, 6]
    assert (found["waited_s"], found["pauses"]) == (3 * HOUR, 0)
    assert "start in 3.00 h, without a pause" in found["when"]


@pytest.mark.parametrize(
    ("source", "by_h", "says"),
    [
        (Hourly(fails_from=0), 10, "start now: no carbon intensity forecast from a made-up grid"),
        (Hourly((100,) * 10), 10, "start now: no other schedule saves 1%"),
        (ConstantIntensity(350, "marginal"), 10, "start now: no other schedule saves 1%"),
        (Hourly(), -1, "start now: no schedule meets the deadline; starting now ends 5.00 h after it"),
        (Hourly(), 3, "start now: no schedule meets the deadline; starting now ends 60 min 0 s after it"),
    ],
    ids=["no forecast", "one level", "a constant", "a deadline that is over", "too little time"],
)
def test_it_starts_now_and_says_why(day, plain, tmp_path, source, by_h, says):
    found = day.train(source, tmp_path / "kept", by_h=by_h)
    same(day, plain)
    assert found["when"].startswith(says)
    assert "token" not in found["when"]
    assert (day.slept_s, found["pauses"]) == (0, 0)


def test_a_source_that_fails_at_a_pause_lets_it_go_on(day, plain, tmp_path):
    found = day.train(Hourly(fails_from=1), tmp_path / "kept")
    same(day, plain)
    assert (found["pauses"], day.slept_s) == (1, 0)
    assert day.told[1].startswith("start now: no carbon intensity forecast")


@pytest.fixture
def python_signals():
    """Heed Ctrl-C, which is ignored in what a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "end", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_signal_while_it_waits_ends_it_and_nothing_is_lost(day, plain, tmp_path, python_signals, number, end, code):
    handler = signal.getsignal(number)
    day.asleep = lambda: day.slept_s > 600 and os.kill(os.getpid(), number)
    with pytest.raises(end) as left:
        day.train(Hourly(), tmp_path / "kept", record=tmp_path / "run.jsonl")
    assert getattr(left.value, "code", None) == code
    assert signal.getsignal(number) is handler
    assert len(day.losses) == 6
    assert [each.name for each in committed_folders(tmp_path / "kept")] == ["step-6"]
    assert read_record(tmp_path / "run.jsonl").end.reason == "interrupted"
    day.asleep = lambda: None
    found = day.train(Hourly(), tmp_path / "kept", record=tmp_path / "run.jsonl")
    same(day, plain)
    assert found["resumed_at_rows"] == 6 * 32


def test_a_signal_before_the_first_window_leaves_no_trace(day, tmp_path):
    day.asleep = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        day.train(Hourly((300, 300, 300, 100, 100, 100, 100, 300)), tmp_path / "kept", record=tmp_path / "run.jsonl")
    assert (day.models, list(tmp_path.iterdir())) == ([], [])


def test_a_signal_before_a_pause_or_while_a_stretch_is_made_ready_is_not_overlooked(day, plain, tmp_path):
    day.in_window = lambda: len(day.losses) == 6 and signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        day.train(Hourly(), tmp_path / "kept")
    assert (len(day.losses), day.slept_s) == (6, 0)
    day.train(Hourly(), tmp_path / "kept")
    same(day, plain)


def test_a_signal_while_a_stretch_is_made_ready_ends_it_after_a_window(day, plain, tmp_path):
    day.making = lambda: len(day.models) == 2 and signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        day.train(Hourly(), tmp_path / "kept")
    assert [each.name for each in committed_folders(tmp_path / "kept")] == ["step-7", "step-6"]
    day.train(Hourly(), tmp_path / "kept")
    same(day, plain)


def test_a_run_that_is_slower_than_it_was_thought_starts_sooner_again(day, plain, tmp_path):
    day.in_window = lambda: setattr(day, "now_s", day.now_s + STEP_S / 2)
    found = day.train(Hourly(), tmp_path / "kept")
    same(day, plain)
    assert max(day.trained_at) <= NOW + 10 * HOUR
    assert found["pauses"] >= 1


def test_a_clock_that_runs_away_costs_a_pause_and_no_more(day, plain, tmp_path):
    # As of a machine that slept: one window is trained, and what is left is decided anew.
    jumps = [NOW + 3.9 * HOUR]
    day.asleep = lambda: jumps and setattr(day, "now_s", jumps.pop())
    day.train(Hourly(), tmp_path / "kept")
    same(day, plain)


def test_a_run_that_is_over_is_evaluated_without_a_wait(day, tmp_path):
    first = day.train(Hourly(), tmp_path / "kept")
    told = len(day.told)
    again = day.train(Hourly(), tmp_path / "kept")
    assert again["accuracy"] == first["accuracy"]
    assert len(day.told) == told
    assert len(day.losses) == STEPS


def test_what_cannot_be_gone_on_with_is_refused_before_the_wait(day, tmp_path):
    hours = LowCarbonOptions(Hourly((300, 300, 300, 100, 100, 100, 100)), NOW + 7 * HOUR, STEP_S, STEPS * STEP_S)
    asked = day.training(tmp_path / "kept")
    asked = replace(asked, checkpoints=replace(asked.checkpoints, resume="always"))
    with raises(FormatError, code="checkpoint.missing"):
        train_clean(asked, hours, day.told.append)
    assert day.slept_s == 0
