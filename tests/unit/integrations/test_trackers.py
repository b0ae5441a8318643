"""A tracker follows a record: it is sent what is written, and can neither hold up, harm nor outlive the run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import SaveError, ValueGivenError
from trimtab.core.record import End, Evaluation, Event, Header, RecordWriter, StepRecord, read_record
from trimtab.integrations.trackers import Tracker
from trimtab.integrations.tracking import TrackedRecord, TrackerQueue
from trimtab.plans.plan import Plan

SOURCE = Path(__file__).parents[3] / "src"
HEADER = Header("a run", 1, {"precision": {"value": "bf16"}}, {"torch": "2.13"})
LIMIT_S = 20.0  # after which a tracker that a test holds goes on, so that a defect fails and does not hang


class Keeping:
    """A tracker that keeps what it is sent."""

    def __init__(self) -> None:
        self.begun, self.rows, self.ended, self.batches = [], [], [], []

    def begin(self, name, parameters):
        self.begun.append((name, dict(parameters)))

    def log(self, rows):
        self.rows += rows
        self.batches.append(len(rows))

    def end(self, reason):
        self.ended.append(reason)


class Held(Keeping):
    """A tracker that hangs in one method until it is let go."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.let_go, self.reached = where, threading.Event(), threading.Event()

    def _at(self, where):
        if where == self.where:
            self.reached.set()
            self.let_go.wait(LIMIT_S)

    def begin(self, name, parameters):
        self._at("begin")
        super().begin(name, parameters)

    def log(self, rows):
        self._at("log")
        super().log(rows)

    def end(self, reason):
        self._at("end")
        super().end(reason)


class Failing(Keeping):
    """A tracker that raises in one method."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def begin(self, name, parameters):
        self._at("begin")

    def log(self, rows):
        self._at("log")

    def end(self, reason):
        self._at("end")

    def _at(self, where):
        self.begun.append(where)
        if where == self.where:
            raise self.error


def step(index: int) -> StepRecord:
    return StepRecord(index, 8, 8.0, 2.0 / (index + 1), 0.1, 0.01)


LINES = (
    *map(step, range(3)),
    Event("précision", 3, {"to": "fp32"}),
    step(3),
    Evaluation(32, 0.04, {"accuracy": 0.5}),
    End("closed", {"energy_j": None}),
)


@pytest.fixture
def held():
    """Make trackers that hang; they are let go after the test."""
    made = []

    def make(where):
        made.append(Held(where))
        return made[-1]

    yield make
    for each in made:
        each.let_go.set()
    for thread in ours():
        thread.join(LIMIT_S)


def ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("trimtab-")]


def write(path, trackers, lines=LINES, **options):
    with TrackedRecord(path, HEADER, trackers, **options) as record:
        for line in lines:
            record.write(line)


def plain(path, lines=LINES) -> bytes:
    with RecordWriter(path, HEADER) as record:
        for line in lines:
            record.write(line)
    return path.read_bytes()


def without_notes(path) -> bytes:
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b'{"kind": "event", "name": "tracker"'))


def notes(path) -> list[Event]:
    return [each for each in read_record(path).events if each.name == "tracker"]


def test_a_run_is_sent_as_it_is_recorded(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, kept, path = torch.optim.SGD(model.parameters(), lr=0.1), Keeping(), tmp_path / "run.jsonl"
    with (
        TrackedRecord(path, HEADER, [kept]) as record,
        trimtab.start(model, optimizer, Plan.fixed(4), record=record, clip_norm=1.0) as run,
    ):
        for window in run.windows(torch.randn(4, 3) for _ in range(120)):
            run.train_step(window, lambda model, batch: model(batch).square().mean())
        run.evaluated(0.5, "accuracy")
    found = read_record(path)
    trained = [row for row in kept.rows if "train/loss" in row.values]
    assert [row.step for row in trained] == list(range(120))
    assert [row.values["train/loss"] for row in trained] == [each.loss for each in found.steps]
    assert [row.values["train/grad_norm"] for row in trained] == [each.grad_norm for each in found.steps]
    (judged,) = (row for row in kept.rows if "evaluation/accuracy" in row.values)
    assert (judged.step, judged.values["evaluation/samples"]) == (120, 480.0)
    assert [name for name, _ in kept.begun] == ["a run"]
    assert kept.begun[0][1]["plan.precision.value"] == "bf16"
    assert kept.ended == ["closed"]
    assert ours() == []
    assert notes(path) == []


def test_lines_come_in_order_and_the_record_is_the_same_byte_for_byte(tmp_path):
    kept = Keeping()
    write(tmp_path / "r.jsonl", [kept])
    assert [row.step for row in kept.rows] == [0, 1, 2, 3, 3, 4]
    assert kept.rows[3].values == {"event/précision": '{"to": "fp32"}'}
    expected = plain(tmp_path / "plain.jsonl")
    write(tmp_path / "none.jsonl", [])
    write(tmp_path / "two.jsonl", [Keeping(), Keeping()])
    assert (tmp_path / "none.jsonl").read_bytes() == expected
    assert (tmp_path / "two.jsonl").read_bytes() == expected


def test_what_waited_is_sent_at_once_and_without_a_tracker_nothing_starts(tmp_path, held):
    with TrackedRecord(tmp_path / "r.jsonl", HEADER, []) as record:
        record.write(step(0))
        assert ours() == []
    slow = held("begin")
    with TrackedRecord(tmp_path / "slow.jsonl", HEADER, [slow]) as record:
        for each in range(250):
            record.write(step(each))
        slow.let_go.set()
    assert slow.batches == [100, 100, 50]


def test_a_run_without_an_end_is_cut_off_and_the_last_end_counts(tmp_path):
    cut, ended = Keeping(), Keeping()
    write(tmp_path / "cut.jsonl", [cut], LINES[:-1])
    write(tmp_path / "ended.jsonl", [ended], (*LINES, End("completed")))
    assert (cut.ended, ended.ended) == (["cut off"], ["completed"])
    kept = Keeping()
    record = TrackedRecord(tmp_path / "r.jsonl", HEADER, [kept])
    record.close()
    record.close()
    assert kept.ended == ["cut off"]
    assert {name for name in vars(Tracker) if not name.startswith("_")} == {"begin", "log", "end"}
    assert isinstance(Keeping(), Tracker)


@pytest.mark.parametrize(("rank", "num_samples"), [("0", 6), ("1", 0)])
def test_only_rank_0_tracks(tmp_path, monkeypatch, rank, num_samples):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = Keeping()
    write(tmp_path / "r.jsonl", [kept])
    assert len(kept.rows) == num_samples
    assert (tmp_path / "r.jsonl").read_bytes() == plain(tmp_path / "plain.jsonl")


def test_the_rank_is_that_of_the_group_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    kept = Keeping()
    write(tmp_path / "r.jsonl", [kept])
    assert (kept.begun, kept.rows) == ([], [])


def test_a_forked_process_does_not_track(tmp_path, monkeypatch):
    kept = Keeping()
    record = TrackedRecord(tmp_path / "r.jsonl", HEADER, [kept])
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    record.write(step(0))
    monkeypatch.undo()
    record.write(step(1))
    record.close()
    assert [row.step for row in kept.rows] == [1]
    assert len(read_record(tmp_path / "r.jsonl").steps) == 2


def test_a_full_queue_drops_and_counts_and_does_not_block(tmp_path, held):
    slow, path = held("begin"), tmp_path / "r.jsonl"
    record = TrackedRecord(path, HEADER, [slow], capacity=10)
    begin = time.monotonic()
    for each in range(25):
        record.write(step(each))
    assert time.monotonic() - begin < LIMIT_S / 2
    slow.let_go.set()
    with pytest.warns(RuntimeWarning, match=r"Held .* 15 of 25 lines"):
        record.close()
    assert [row.step for row in slow.rows] == list(range(10))
    assert slow.ended == ["cut off"]
    assert [(each.detail["tracker"], each.detail["code"]) for each in notes(path)] == [("Held", "tracker.slow")]
    assert without_notes(path) == plain(tmp_path / "plain.jsonl", map(step, range(25)))


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["begin", "log", "end"])
def test_what_a_tracker_raises_ends_that_tracker_alone(tmp_path, where, error):
    failing, kept, path = Failing(where, error), Keeping(), tmp_path / "r.jsonl"
    with pytest.warns(RuntimeWarning, match=f"Failing .*{type(error).__name__}") as warned:
        write(path, [failing, kept])
    assert len(warned) == 1
    assert failing.begun[-1] == where, "it is called no more"
    assert (len(kept.rows), kept.ended) == (6, ["closed"])
    (note,) = notes(path)
    assert note.detail["tracker"] == "Failing"
    assert note.detail["code"] == "tracker.raised"
    assert note.detail["error"].startswith(type(error).__name__)
    assert without_notes(path) == plain(tmp_path / "plain.jsonl")


FAILED = {"tracker": "Failing", "code": "tracker.raised", "error": "OSError: no route"}


def test_a_failure_is_noted_once_before_the_next_line(tmp_path):
    path = tmp_path / "r.jsonl"
    record = TrackedRecord(path, HEADER, [Failing("log", OSError("no route"))])
    record.write(step(0))
    for thread in ours():
        thread.join(LIMIT_S)
    record.write(step(1))
    record.write(step(2))
    record.flush()
    kinds = [line.split(b'"')[3] for line in path.read_bytes().splitlines()]
    assert kinds == [b"header", b"step", b"event", b"step", b"step"]
    assert notes(path) == [Event("tracker", 1, FAILED)]
    with pytest.warns(RuntimeWarning, match="3 of 3 lines"):
        record.close()
    assert len(notes(path)) == 1


@pytest.mark.parametrize("where", ["begin", "log", "end"])
def test_a_tracker_that_hangs_is_left_after_the_time_given(tmp_path, held, where):
    hung, kept, path = held(where), Keeping(), tmp_path / "r.jsonl"
    record = TrackedRecord(path, HEADER, [hung, kept], wait_s=0.2)
    for line in LINES:
        record.write(line)
    assert where == "end" or hung.reached.wait(LIMIT_S)
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"Held .*0\.2 s"):
        record.close()
    assert 0.15 < time.monotonic() - begin < LIMIT_S / 2
    assert (len(kept.rows), kept.ended) == (6, ["closed"])
    assert [each.detail["code"] for each in notes(path)] == ["tracker.timeout"]
    assert without_notes(path) == plain(tmp_path / "plain.jsonl")


def test_an_interrupt_while_waiting_is_passed_on_with_the_file_whole_and_closed(tmp_path, monkeypatch):
    path, seen = tmp_path / "r.jsonl", []

    def interrupted(*given):
        seen.append(len(read_record(path).steps))
        raise KeyboardInterrupt

    record = TrackedRecord(path, HEADER, [Keeping()])
    record.write(step(0))
    monkeypatch.setattr(TrackerQueue, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.close()
    assert seen == [1], "written before the wait, which something may end the process in"
    with pytest.raises(ValueError, match=r"r\.jsonl: the file is closed"):
        record.write(step(1))
    assert len(read_record(path).steps) == 1


def test_a_full_disk_keeps_no_tracker_from_its_end(tmp_path, monkeypatch):
    kept = Keeping()
    record = TrackedRecord(tmp_path / "r.jsonl", HEADER, [kept])
    for line in LINES:
        record.write(line)

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with raises(SaveError, code="checkpoint.not_saved"):
            record.close()
    assert (len(kept.rows), kept.ended) == (6, ["closed"])
    assert ours() == []


def test_a_password_in_an_address_is_not_recorded(tmp_path):
    path = tmp_path / "r.jsonl"
    error = ConnectionError("to https://me:hunter2@host:5000/api failed")
    with pytest.warns(RuntimeWarning, match=r"https://\*\*\*@host:5000/api failed"):
        write(path, [Failing("begin", error)])
    assert "hunter2" not in path.read_text()


def test_a_run_that_is_gone_on_with_sends_what_it_adds(tmp_path):
    path, kept = tmp_path / "r.jsonl", Keeping()
    with TrackedRecord(path, HEADER, []) as record:
        record.write(step(0))
        size = record.end()
        record.write(step(1))
    with TrackedRecord(path, HEADER, [kept], continues=True) as record:
        record.keep(size)
        record.write(step(1))
    assert [row.step for row in kept.rows] == [1]
    assert [each.index for each in read_record(path).steps] == [0, 1]


def test_a_failure_before_anything_is_written_leaves_an_earlier_record_as_it_is(tmp_path):
    path = tmp_path / "r.jsonl"
    earlier = plain(path)
    record = TrackedRecord(path, HEADER, [Failing("begin", OSError("no route"))], continues=True)
    with pytest.warns(RuntimeWarning, match="no route"):
        record.close()
    assert path.read_bytes() == earlier
    record = TrackedRecord(path, HEADER, [Failing("begin", OSError("no route"))], continues=True)
    for thread in ours():
        thread.join(LIMIT_S)
    record.write(step(0))
    record.write(step(1))
    with pytest.warns(RuntimeWarning, match="no route"):
        record.close()
    kinds = [line.split(b'"')[3] for line in path.read_bytes().splitlines()]
    assert kinds == [b"header", b"step", b"event", b"step"]


@pytest.mark.parametrize(
    ("trackers", "options", "code", "field"),
    [
        ("wandb", {}, "tracker.invalid", "trackers"),
        (Keeping(), {}, "tracker.invalid", "trackers"),
        ([Keeping], {}, "tracker.invalid", "trackers"),
        ([Keeping(), None], {}, "tracker.invalid", "trackers"),
        ([Keeping()], {"capacity": 0}, "value.invalid", "capacity"),
        ([Keeping()], {"wait_s": -1.0}, "value.invalid", "wait_s"),
        ([Keeping()], {"wait_s": float("inf")}, "value.invalid", "wait_s"),
    ],
    ids=("a name", "one, bare", "a class", "None", "no capacity", "a negative wait", "an endless wait"),
)
def test_what_does_not_fit_is_refused_before_a_file_is_made(tmp_path, trackers, options, code, field):
    with raises(ValueGivenError, code=code, field=field):
        TrackedRecord(tmp_path / "r.jsonl", HEADER, trackers, **options)
    assert not (tmp_path / "r.jsonl").exists()
    assert ours() == []


HANGING = """
import sys, threading
from trimtab.integrations import trackers, tracking
print(threading.active_count(), sorted({{'mlflow', 'tensorboard', 'trackio', 'wandb'}} & sys.modules.keys()))
from trimtab.core.record import Header, StepRecord

class Hanging:
    def begin(self, name, parameters): pass
    def log(self, rows): threading.Event().wait()
    def end(self, reason): pass

closed = tracking.TrackedRecord({closed!r}, Header('closed'), [Hanging()], wait_s=0.1)
never = tracking.TrackedRecord({never!r}, Header('never closed'), [Hanging()])
for record in (closed, never):
    record.write(StepRecord(0, 8, 8.0, 2.0, 0.1, 0.5))
closed.close()
print('over')
"""


def test_an_interpreter_ends_though_its_trackers_hang_and_importing_starts_nothing(tmp_path):
    code = HANGING.format(closed=str(tmp_path / "closed.jsonl"), never=str(tmp_path / "never.jsonl"))
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["1 []", "over", ""]), done.stderr
    assert all(word in done.stderr for word in ("Hanging", "0.1 s", "1 of 1 lines"))
    assert len(read_record(tmp_path / "never.jsonl").steps) == 1
