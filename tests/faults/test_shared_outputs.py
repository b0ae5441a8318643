"""Outputs that two runs would write at once: the second is refused, and the first loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from saving import forked
from torch import nn

import trimtab
from trimtab.checkpoint.run_lock import NAME, locked
from trimtab.core.errors import InUseError, RecordExistsError
from trimtab.core.files import require_unlocked
from trimtab.core.record import Header, RecordWriter, StepRecord, read_record

OWN = Header("it", 0)


def step(index: int) -> StepRecord:
    return StepRecord(index, 4, 4.0, 1.0, 0.1, 0.1)


class Child:
    """A forked process that does something, and then waits to be ended."""

    def __init__(self, work) -> None:
        out, self._into = os.pipe()
        ready, into = os.pipe()

        def does() -> None:
            held = work()
            os.write(into, b".")
            os.read(out, 1)
            del held

        self.pid = forked(does)
        assert os.read(ready, 1) == b"."
        for each in (out, ready, into):
            os.close(each)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._into)


@pytest.fixture
def child():
    made = []

    def start(work) -> Child:
        made.append(Child(work))
        return made[-1]

    yield start
    for each in made:
        with contextlib.suppress(OSError):  # it was ended already
            each.kill()


def writing(path: Path) -> RecordWriter:
    writer = RecordWriter(path, OWN, continues=True)
    writer.write(step(0))
    writer.flush()
    return writer


def test_a_record_is_written_by_one_process(tmp_path, child):
    path = tmp_path / "r.jsonl"
    other = child(lambda: writing(path))
    before = path.read_bytes()
    for refused in (lambda: RecordWriter(path, OWN, continues=True), lambda: require_unlocked(path)):
        with pytest.raises(InUseError) as raised:
            refused()
        assert raised.value.code == "output.in_use"
        assert raised.value.pid in (other.pid, None)
    with pytest.raises(RecordExistsError):
        RecordWriter(path, OWN)
    assert path.read_bytes() == before
    other.kill()
    with RecordWriter(path, OWN, continues=True) as writer:
        writer.keep(len(before))
        writer.write(step(1))
    assert [each.index for each in read_record(path).steps] == [0, 1]


def test_a_record_is_written_by_one_writer_of_a_process(tmp_path):
    path = tmp_path / "r.jsonl"
    with writing(path):
        with pytest.raises(InUseError):
            RecordWriter(path, OWN, continues=True)
        raised = []

        def second() -> None:
            try:
                RecordWriter(path, OWN, continues=True)
            except InUseError as error:
                raised.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(raised) == 1
    RecordWriter(path, OWN, continues=True).close()


def test_by_another_name_it_is_the_same_record(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "r.jsonl")
    with writing(tmp_path / "r.jsonl"), pytest.raises(InUseError):
        RecordWriter(tmp_path / "link.jsonl", OWN, continues=True)


def test_a_worker_that_outlives_its_run_does_not_hold_the_record(tmp_path, child):
    path = tmp_path / "r.jsonl"
    writer = writing(path)
    child(lambda: None)
    writer.close()
    with RecordWriter(path, OWN, continues=True) as again:
        again.keep(path.stat().st_size)


def test_a_child_s_copy_adds_nothing_and_the_parent_s_goes_on(tmp_path):
    path = tmp_path / "r.jsonl"
    with writing(path) as writer:
        writer.write(step(1))

        def work() -> None:
            writer.write(step(7))
            writer.flush()
            writer.close()

        os.waitpid(forked(work), 0)
        writer.write(step(2))
        with pytest.raises(InUseError):
            RecordWriter(path, OWN, continues=True)
    assert [each.index for each in read_record(path).steps] == [0, 1, 2]


def test_a_record_that_was_set_aside_is_free_and_the_new_one_is_held(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, Header("it", 0, plan={"a": 1})) as before:
        before.write(step(0))
    with RecordWriter(path, OWN, continues=True) as writer:
        with pytest.warns(UserWarning, match="another plan"):
            writer.write(step(0))
        require_unlocked(tmp_path / "r.jsonl.1")
        with pytest.raises(InUseError):
            RecordWriter(path, OWN, continues=True)
    require_unlocked(path)


@pytest.mark.parametrize("replaced", ["deleted", "replaced"])
def test_without_its_file_a_folder_is_still_held(tmp_path, child, replaced):
    other = child(lambda: locked(tmp_path))
    (tmp_path / NAME).unlink()
    if replaced == "replaced":
        (tmp_path / NAME).write_text("{}")
    for _ in range(2):
        with pytest.raises(InUseError) as raised:
            locked(tmp_path)
        assert raised.value.pid in (other.pid, None)
    other.kill()
    locked(tmp_path).release()


def test_a_folder_is_held_once_by_a_process_and_its_threads(tmp_path):
    with locked(tmp_path):
        (tmp_path / NAME).unlink()
        raised = []

        def second() -> None:
            try:
                locked(tmp_path)
            except InUseError as error:
                raised.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(raised) == 1
    locked(tmp_path).release()


def train(folder: Path, record: Path | None = None, during=lambda: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keep = trimtab.Checkpoints(folder, every_s=None)
    writer = None if record is None else RecordWriter(record, OWN, continues=True)
    try:
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(4), checkpoints=keep, record=writer) as run:
            for index, window in enumerate(run.windows([torch.randn(4, 3) for _ in range(4)])):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
                if index == 1:
                    during()
    finally:
        if writer is not None:
            writer.close()


def test_two_runs_into_one_record_or_one_folder(tmp_path):
    path = tmp_path / "r.jsonl"

    def second() -> None:
        with pytest.raises(InUseError):
            train(tmp_path / "b", path)
        with pytest.raises(InUseError):
            train(tmp_path / "a")

    train(tmp_path / "a", path, second)
    assert len(read_record(path).steps) == 4
