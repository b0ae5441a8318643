"""`trimtab train --track`: trackers follow the record that the command writes."""

from __future__ import annotations

import sys

import pytest
import tracker_packages
from tracker_packages import Calls
from train_here import trained_here

from trimtab.core.record import read_record


@pytest.fixture
def train(monkeypatch, capsys, tmp_path):
    with trained_here(monkeypatch, capsys, tmp_path) as run:
        yield run


@pytest.fixture
def boards(monkeypatch):
    """Stand-ins for two packages; returns what each was told."""
    told = {name: Calls() for name in ("tensorboard", "wandb")}
    for name, calls in told.items():
        for each, stand_in in getattr(tracker_packages, name)(calls).items():
            monkeypatch.setitem(sys.modules, each, stand_in)
    return told


def test_trackers_follow_the_record(train, tmp_path, boards):
    track = ("--track", "tensorboard=runs/mine", "--track", "wandb=mine", "--record", "run.jsonl")
    code, _, err = train("--plan", "plan.json", "--steps", 6, *track)
    assert (code, err) == (0, "")
    assert boards["tensorboard"].opened["folder"] == "runs/mine"
    assert boards["wandb"].opened["project"] == "mine"
    losses = [step.loss for step in read_record(tmp_path / "run.jsonl").steps]
    assert len(losses) == 6
    for told in boards.values():
        assert [value for _, name, value in told.rows if name == "train/loss"] == losses
        assert len(told.closed) == 1


def test_the_record_is_the_same_with_trackers_as_without(train, tmp_path, boards):
    for record, track in (("with.jsonl", ("--track", "wandb=mine")), ("without.jsonl", ())):
        assert train("--plan", "plan.json", "--steps", 6, "--record", record, *track)[0] == 0
    found = [read_record(tmp_path / f"{name}.jsonl") for name in ("with", "without")]
    assert [step.loss for step in found[0].steps] == [step.loss for step in found[1].steps]
    assert [event.name for event in found[0].events] == [event.name for event in found[1].events]


def test_a_run_that_is_gone_on_with_is_followed_from_there(train, tmp_path, boards):
    kept = ("--plan", "plan.json", "--checkpoints", "kept", "--record", "run.jsonl", "--track", "tensorboard=runs")
    assert train(*kept, "--steps", 3)[0] == 0
    assert train(*kept, "--steps", 5)[0] == 0
    steps = [step for step, name, _ in boards["tensorboard"].rows if name == "train/loss"]
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--track", "aim=runs", "--record", "r.jsonl"), "tracker.unknown", "'aim=runs'"),
        (("--track", "tensorboard=runs"), "option.required", "--track tensorboard=runs"),
        (("--track", "wandb=mine", "--record", "r.jsonl"), "dependency.missing", "pip install 'trimtab[wandb]'"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_before_anything_is_measured(
    train, tmp_path, monkeypatch, boards, arguments, code, word
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, out, err = train(*arguments)  # without a plan: one would have to be made
    assert (status, out) == (1, "")
    assert word in err
    assert err.endswith(f" [{code}]\n")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["plan.json", "tiny.py"]
