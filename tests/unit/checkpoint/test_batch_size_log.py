"""What windows were made by: taken again by the same plan, and by no other."""

from __future__ import annotations

import errno
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest
from raising import raises

from trimtab.checkpoint.batch_size_log import NAME, BatchSizeLog
from trimtab.core.errors import FormatError, SaveError, ValueGivenError
from trimtab.training.hooks import WindowDecision

ONE, TWO, THREE = WindowDecision(1, 2), WindowDecision(4, 8, is_cut=True), WindowDecision(2, 4)


def begun(journal, windows=0):
    journal.prepare(windows)
    journal.begin()


def written(folder, plan="a plan", begins=0, **windows):
    """Return the journal of a run that decided windows, by number."""
    journal = BatchSizeLog(folder / NAME, plan, writes=True)
    begun(journal, begins)
    for index, window in windows.items():
        journal.add(int(index[1:]), window)
    return journal


def seen(folder, plan="a plan", begins=0, writes=False):
    journal = BatchSizeLog(folder / NAME, plan, writes=writes)
    begun(journal, begins)
    journal.close()
    return [journal.before(index) for index in range(3)]


def test_what_was_decided_is_decided_again_and_once(tmp_path):
    journal = written(tmp_path, _0=ONE, _1=TWO)
    journal.add(1, THREE)
    journal.close()
    assert seen(tmp_path) == [ONE, TWO, None]
    assert seen(tmp_path, begins=1) == [None, TWO, None]  # of windows that are over nothing is asked
    written(tmp_path, begins=2, _1=THREE, _2=THREE).close()
    assert seen(tmp_path) == [ONE, TWO, THREE]


def test_of_windows_that_are_over_nothing_is_held(tmp_path):
    journal = written(tmp_path, **{f"_{index}": ONE for index in range(1_000)})
    journal.close()
    assert journal._decided == {}
    again = BatchSizeLog(tmp_path / NAME, "a plan", writes=True)
    begun(again, 400)
    assert len(again._decided) == 600
    for index in range(400, 1_000):
        assert again.before(index) == again.before(index) == ONE
        again.add(index, TWO)
    assert len(again._decided) == 1
    again.close()
    assert (tmp_path / NAME).read_bytes().count(b"\n") == 1_001


def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path):
    written(tmp_path, _0=ONE, _1=TWO).close()
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-5])
    written(tmp_path, _1=THREE).close()
    assert seen(tmp_path) == [ONE, THREE, None]


def summed(text: str) -> bytes:
    """Return a line as one who can write there could: whatever it says, its checksum is right."""
    data = json.loads(text)
    return json.dumps(data | {"crc32": f"{zlib.crc32(json.dumps(data).encode()):08x}"}).encode()


LINES = {
    "nothing": b"{}",
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "levels without end": b"[" * 100_000,
    "a number without end": b"1" * 5_000,
    "a pickle": pickle.dumps(print).replace(b"\n", b" "),
    "longer than any": b"x" * 2**21,
    "without a checksum": b'{"window": 1, "num_batches": 1, "k": 2, "is_cut": false}',
    "without batches": summed('{"window": 1, "k": 2}'),
    "a window that is none": summed('{"window": "x", "num_batches": 1, "k": 1}'),
    "an infinite window": summed('{"window": 1e400, "num_batches": 1, "k": 1, "is_cut": false}'),
    "out of order": summed('{"window": 0, "num_batches": 1, "k": 1, "is_cut": false}'),
    "no batches": summed('{"window": 1, "num_batches": 0, "k": 1, "is_cut": false}'),
    "no micro-batches": summed('{"window": 1, "num_batches": 1, "k": 0, "is_cut": false}'),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_any_other_damage_is_refused_by_its_line(tmp_path, line):
    written(tmp_path, _0=ONE).close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(line + b"\n")
    with raises(FormatError, code="decisions.damaged"):
        seen(tmp_path)


def test_every_flipped_bit_is_found(tmp_path):
    written(tmp_path, _0=ONE, _1=TWO, _2=THREE).close()
    path = tmp_path / NAME
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with raises(FormatError, code="decisions.damaged"):
            seen(tmp_path)


def test_a_fixed_plan_goes_on_whatever_became_of_its_line(tmp_path):
    written(tmp_path).close()
    (tmp_path / NAME).write_bytes(b"\0" * 40 + b"\n")
    written(tmp_path, begins=7, _7=ONE).close()
    assert seen(tmp_path, begins=7) == [None] * 3


def test_a_refusal_changes_nothing_and_leaves_nothing(tmp_path):
    written(tmp_path, _0=ONE).close()
    before = (tmp_path / NAME).read_bytes()
    journal = BatchSizeLog(tmp_path / NAME, "another", writes=True)
    journal.prepare(0)
    assert len(list(tmp_path.iterdir())) == 2
    journal.close()
    assert [each.name for each in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


def test_nothing_is_written_through_links_or_waited_for(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / f"{NAME}.partial").symlink_to(tmp_path / "mine")
    written(tmp_path, _0=ONE).close()
    assert (tmp_path / "mine").read_text() == "kept"
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "mine"), Path.mkdir):
        path = tmp_path / NAME
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        with raises(FormatError, code="decisions.unreadable"):
            seen(tmp_path)


def test_a_full_disk_leaves_no_half_of_a_line_and_what_waits_is_written_with_the_next(tmp_path, monkeypatch):
    journal, write = written(tmp_path, _0=ONE), os.write

    def half(descriptor, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with raises(SaveError, code="checkpoint.not_saved"):
        journal.add(1, TWO)
    assert seen(tmp_path) == [ONE, None, None]
    monkeypatch.setattr(os, "write", write)
    journal.add(2, THREE)
    journal.close()
    assert seen(tmp_path) == [ONE, TWO, THREE]


def test_what_another_plan_decided_says_nothing_of_windows_to_come(tmp_path):
    written(tmp_path, _0=ONE, _1=TWO, _2=THREE).close()
    assert seen(tmp_path, plan="another", begins=1, writes=True) == [None, None, None]
    assert seen(tmp_path, plan="another") == [ONE, None, None]
    assert seen(tmp_path, plan="a third", begins=0) == [None, None, None]


def test_another_run_is_followed_by_the_same_plan_alone(tmp_path):
    (tmp_path / "other").mkdir()
    written(tmp_path, _0=ONE, _1=TWO).close()
    journal = BatchSizeLog(tmp_path / "other" / NAME, "a plan", writes=True)
    journal.follow(tmp_path / NAME)
    begun(journal)
    assert [journal.before(index) for index in range(3)] == [ONE, TWO, None]
    journal.close()
    with raises(ValueGivenError, code="follows.other_plan", field="checkpoints.follows"):
        BatchSizeLog(tmp_path / "x", "another", writes=True).follow(tmp_path / NAME)
    with raises(ValueGivenError, code="follows.no_decisions", field="checkpoints.follows"):
        BatchSizeLog(tmp_path / "x", "a plan", writes=True).follow(tmp_path / "none" / NAME)
