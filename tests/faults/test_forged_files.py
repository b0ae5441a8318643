"""Files that somebody forged, in place of each that is read: none runs, hangs, or ends in an error of another kind."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises

import trimtab
from trimtab.checkpoint.atomic_directory import NAME, TREE, FileEntry, Manifest, encoded, manifest_of
from trimtab.checkpoint.batch_size_log import BatchSizeLog, _summed
from trimtab.checkpoint.run_lock import LockHolder
from trimtab.checkpoint.state_files import read_state, write_state
from trimtab.core.errors import FormatError, TrimtabError, UsageError
from trimtab.core.record import Header, RecordWriter, StepRecord, read_record
from trimtab.core.serialization import read_json, to_jsonable
from trimtab.experiments.pages import run_page
from trimtab.experiments.results import SETTINGS, read_result, read_settings
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.training.hooks import WindowDecision


def in_folder(name, read):
    """Return what reads a file by the folder that it is in."""

    def of(path: Path):
        (path.parent / "folder").mkdir(exist_ok=True)
        path.rename(path.parent / "folder" / name)
        return read(path.parent / "folder")

    return of


READERS = {
    "plan": lambda path: read_json(Plan, path),
    "profile": lambda path: read_json(Profile, path),
    "record": read_record,
    "result": read_result,
    "settings of a comparison": in_folder(SETTINGS, read_settings),
    "decisions": lambda path: BatchSizeLog(path, "a plan", writes=False).follow(path),
    "manifest": in_folder(NAME, manifest_of),
    "state": in_folder(TREE, read_state),
}


class Evil:
    """A pickle that leaves a mark."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def deep(levels: int, mapping: bool = False) -> bytes:
    opens, closes = (b'{"a":', b"}") if mapping else (b"[", b"]")
    return opens * levels + b"1" + closes * levels


LIMIT = sys.getrecursionlimit()
FORGED = {
    "nothing": b"",
    "levels without end": b"[" * 100_000,
    "objects without end": b'{"a":' * 100_000,
    "a number without end": b"1" * 5_000,
    "no text": b"\xff\xfe\x00",
    "a list": b"[1]",
    "null": b"null",
    **{f"{levels} levels": deep(levels) for levels in range(LIMIT - 120, LIMIT, 4)},
    **{f"{levels} objects": deep(levels, True) for levels in range(LIMIT - 120, LIMIT, 12)},
}


@pytest.mark.parametrize("kind", READERS)
def test_each_is_refused_by_a_typed_error(kind, tmp_path):
    for number, (name, content) in enumerate(FORGED.items()):
        place = tmp_path / str(number)
        place.mkdir()
        for ending in (b"", b"\n" * 2):
            path = place / f"it{len(ending)}.jsonl" if kind == "record" else place / f"it{len(ending)}.json"
            path.write_bytes(content + ending)
            try:
                READERS[kind](path)
            except UsageError:
                continue
            except Exception as error:
                pytest.fail(f"{name}: {type(error).__name__}: {error}")
            pytest.fail(f"{name} was read")


@pytest.mark.parametrize("kind", READERS)
def test_no_pickle_runs(kind, tmp_path):
    marker = tmp_path / "marker"
    path = tmp_path / ("it.jsonl" if kind == "record" else "it.json")
    path.write_bytes(pickle.dumps(Evil(marker)) + b"\n")
    with pytest.raises(UsageError):
        READERS[kind](path)
    assert not marker.exists()


def recorded(place: Path) -> list[dict]:
    """Return the lines of a record."""
    with RecordWriter(place / "whole.jsonl", Header("it")) as record:
        record.write(StepRecord(0, 4, 4.0, 1.5, 0.1, 0.1))
    return [json.loads(line) for line in (place / "whole.jsonl").read_bytes().splitlines()]


WHOLE = {  # what is in the lines of a file
    "plan": lambda place: [to_jsonable(Plan.fixed(8, 4))],
    "record": recorded,
    "decisions": lambda place: [{"plan": "a plan"}, {"window": 0} | to_jsonable(WindowDecision(1, 2))],
    "manifest": lambda place: [
        to_jsonable(Manifest({TREE: FileEntry(2, ("0",))}, {"step": 1, "world": {"ranks": "1"}}))
    ],
}
SIGNED = {"decisions": _summed, "manifest": encoded}  # whatever they say, their checksum is right


def plainly(data: dict) -> bytes:
    return json.dumps(data).encode() + b"\n"


def lacking(data):
    """Yield what data are without one key, for each key of each object in them."""
    if isinstance(data, dict):
        yield from ({name: each for name, each in data.items() if name != key} for key in data)
        yield from (data | {key: less} for key, each in data.items() for less in lacking(each))
    if isinstance(data, list):
        yield from ([*data[:at], less, *data[at + 1 :]] for at, each in enumerate(data) for less in lacking(each))


@pytest.mark.parametrize("kind", WHOLE)
def test_a_key_that_is_left_out_is_not_needed_or_refused_by_a_typed_error(kind, tmp_path):
    lines = json.loads(json.dumps(WHOLE[kind](tmp_path)))
    refused = []
    for number, each in enumerate([lines, *lacking(lines)]):
        place = tmp_path / str(number)
        place.mkdir()
        path = place / ("it.jsonl" if kind == "record" else "it.json")
        path.write_bytes(b"".join(map(SIGNED.get(kind, plainly), each)))
        try:
            READERS[kind](path)
        except UsageError:
            refused.append(number)
    assert refused
    assert 0 not in refused


STATE = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "bytes of": torch.ones(2, dtype=torch.complex64),
    "array": np.arange(3),
    "scalar": np.float32(2),
    "whole": (2**70, float("nan"), b"it"),
}


def test_a_state_that_lacks_any_one_of_its_keys_is_refused(tmp_path):
    write_state(tmp_path, STATE)
    whole = json.loads((tmp_path / TREE).read_text())
    without = [*lacking(whole)]
    assert len(without) > 30
    for each in without:
        (tmp_path / TREE).write_text(json.dumps(each))
        with raises(FormatError, code="state.malformed"):
            read_state(tmp_path)


LIES = {
    "nothing of a tensor": ("tensor", lambda said: said.clear()),
    "rows of bytes as numbers of eight": ("tensor", lambda said: said.update(type="complex64", shape=[3])),
    "nothing of an array": ("array", lambda said: said.clear()),
    "an array of objects": ("array", lambda said: said.update(type="object")),
    "an array of records": ("array", lambda said: said.update(type="(,)f8,f8")),
    "an array of a list": ("array", lambda said: said.update(type=["uint8"])),
    "an array's shape": ("array", lambda said: said.update(shape=[2**70])),
}


@pytest.mark.parametrize(("kind", "change"), LIES.values(), ids=LIES)
def test_what_is_said_of_numbers_and_is_not_so_is_refused(tmp_path, kind, change):
    rows = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    write_state(tmp_path, rows if kind == "tensor" else rows.numpy())
    said = json.loads((tmp_path / TREE).read_text())
    change(said[kind])
    (tmp_path / TREE).write_text(json.dumps(said))
    with raises(FormatError, code="state.malformed", field="state"):
        read_state(tmp_path)


HOLDER = {"pid": 1, "host": "here"}


def test_a_lock_says_nobody():
    assert LockHolder.said(plainly(HOLDER)) == LockHolder(**HOLDER)
    without = [*map(plainly, lacking(HOLDER)), b'{"pid": 1e400, "host": "here"}']
    assert [LockHolder.said(content) for content in [*FORGED.values(), *without]] == [None] * (len(FORGED) + 3)


# Values of a right shape that no writer writes.

FORGED_VALUES = [
    *(None, True, -1, -(2**70), 2**70, 10**400, -1.5, 1e308, "nan", "-inf", "", "\ud800", "\x1b[31m", [], {}, [1]),
    {"a": {"a": 1}},
]
FORGED_TEXT = ["1e400", "NaN", "-Infinity", "[" * 200 + "]" * 200, "1" * 400]


def places(data, at=()):
    """Yield the place of each value in data."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for name, value in items:
        yield from places(value, (*at, name))


def put(data, at, value):
    """Return data with another value in a place."""
    if not at:
        return value
    head, *rest = at
    changed = dict(data) if isinstance(data, dict) else list(data)
    changed[head] = put(data[head], rest, value)
    return changed


def forged(data, number: int):
    """Yield texts of data with one value forged: a fixed sample of all."""
    every = [(at, value) for at in places(data) for value in range(len(FORGED_VALUES) + len(FORGED_TEXT))]
    for at, value in random.Random(0).sample(every, min(number, len(every))):
        if value < len(FORGED_VALUES):
            yield json.dumps(put(data, at, FORGED_VALUES[value]))
        else:
            yield json.dumps(put(data, at, "@")).replace('"@"', FORGED_TEXT[value - len(FORGED_VALUES)])


def used(kind: str, path: Path) -> None:
    """Read a file, and use what it holds."""
    if kind == "plan":
        plan = read_json(Plan, path)
        assert f"{plan}"
        assert plan.changes_in_words is not None
        model = torch.nn.Linear(3, 1)
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, total_samples=80).close()
    else:
        run_page(read_record(path))


@pytest.mark.parametrize("kind", ["plan", "record"])
def test_forged_values_are_typed_errors_or_of_no_harm(kind, tmp_path):
    lines = json.loads(json.dumps(WHOLE[kind](tmp_path)))
    path = tmp_path / ("it.jsonl" if kind == "record" else "it.json")
    refused = 0
    for index, line in enumerate(lines):
        for text in forged(line, 150):
            whole = [json.dumps(each) for each in lines]
            whole[index] = text
            path.write_text("\n".join(whole) + "\n")
            try:
                used(kind, path)
            except TrimtabError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{text:.300}: {type(error).__name__}: {error}")
    assert refused > 50


@pytest.mark.parametrize("value", FORGED_TEXT)
def test_numbers_that_json_has_not_are_refused(value, tmp_path):
    path = tmp_path / "it.json"
    text = json.dumps(to_jsonable(Plan.fixed(8, 4)) | {"planning_s": "@"})
    path.write_text(text.replace('"@"', value))
    with pytest.raises(FormatError):
        read_json(Plan, path)
